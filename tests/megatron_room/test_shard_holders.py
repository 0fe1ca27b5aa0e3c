# SPDX-License-Identifier: Apache-2.0
"""Which rank holds the copy of which shard of the distributed optimizer's state."""

from __future__ import annotations

import pytest

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.megatron.state.shard_copies import holders_of


def layout(replicas: int, lanes: int, per_host: int) -> JobLayout:
    """One stage; lanes innermost. `per_host`: consecutive ranks on each host."""
    workers = {
        rank: Worker(Cell(rank // lanes, 0), rank % lanes, f"host{rank // per_host}", "boot/net")
        for rank in range(replicas * lanes)
    }
    return JobLayout(0, workers)


def test_each_rank_holds_one_copy_of_another_cells_shard() -> None:
    for replicas, lanes in ((2, 1), (3, 1), (2, 2), (4, 2), (5, 3)):
        ranks = range(replicas * lanes)
        job = layout(replicas, lanes, per_host=1)
        holders = holders_of(job, ranks)
        assert sorted(holders) == list(ranks)
        assert all(job.workers[rank].cell != job.workers[holders[rank]].cell for rank in ranks)


def test_copies_are_on_other_hosts_where_there_are_others() -> None:
    job = layout(8, 1, per_host=4)
    assert all(
        job.workers[rank].host != job.workers[holder].host for rank, holder in enumerate(holders_of(job, range(8)))
    )


def test_corresponding_ranks_of_all_stages_have_their_copies_at_the_same_distance() -> None:
    """Hosts of 8 ranks and of 4: all of the first stage are on one, and two of the last stage with them."""
    workers = {
        rank: Worker(Cell(rank % 6, rank // 6), 0, "large" if rank < 8 else "small", "boot/net") for rank in range(12)
    }
    first, last = (holders_of(JobLayout(0, workers), range(6 * stage, 6 * stage + 6)) for stage in (0, 1))
    assert first == last
    assert sum(workers[6 + place].host != workers[6 + holder].host for place, holder in enumerate(last)) == 4


def test_one_cell_cannot_hold_its_own_copies() -> None:
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] share shards, and no other replica could hold copies"):
        holders_of(layout(1, 2, per_host=2), [0, 1])
