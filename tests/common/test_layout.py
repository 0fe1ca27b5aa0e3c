# SPDX-License-Identifier: Apache-2.0
"""The grid of cells that ranks find of what all of them say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_up.job import layout

from adaptra_megatron.common.layout import Cell, JobLayout


def megatron(tensor: int, replicas: int, stages: int, rank: int, spread: int = 1) -> JobLayout:
    """Megatron's order of ranks: tensor-parallel peers are neighbours, and pipelines outermost. `spread`: replicas that
    experts are spread over."""
    width = tensor * replicas
    pipelines = [[first + width * stage for stage in range(stages)] for first in range(width)]
    joined = [list(range(first, first + tensor)) for first in range(0, width * stages, tensor)]
    for stage in range(stages):
        for block in range(0, width, tensor * spread):
            for lane in range(tensor):
                start = stage * width + block + lane
                joined.append(list(range(start, start + tensor * spread, tensor)))
    return layout(pipelines, rank, joined=joined)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_ranks_of_one_stage_of_one_replica_are_a_cell(
    tensor: int, replicas: int, stages: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, tensor * replicas * stages - 1))
    job = megatron(tensor, replicas, stages, rank)
    stage, place = divmod(rank, tensor * replicas)
    replica, lane = divmod(place, tensor)
    assert (job.cell, job.workers[rank].lane) == (Cell(replica, stage), lane)
    first = stage * tensor * replicas + replica * tensor
    assert job.cells[job.cell] == list(range(first, first + tensor))
    assert job.reporter(job.cell) == first
    assert job.pipeline == [place + tensor * replicas * other for other in range(stages)]
    assert job.cells_of(stage) == [Cell(other, stage) for other in range(replicas)]
    assert sorted(member for ranks in job.cells.values() for member in ranks) == sorted(job.workers)
    together = range(replica * tensor, replica * tensor + tensor)
    assert job.reporters == sorted(lane + tensor * replicas * other for lane in together for other in range(stages))
    assert (job.leader, job.replicas) == (replica * tensor, replicas), (
        "each replica is planned for by a rank of its own"
    )
    live = data.draw(st.sets(st.sampled_from(job.reporters), min_size=1))
    alive = job.alive(live)
    assert (alive.reporters, alive.leader, alive.cells) == (sorted(live), min(live), job.cells)


def test_experts_spread_over_replicas_make_these_one_cell_in_each_stage() -> None:
    job = megatron(2, 4, 2, rank=9, spread=2)
    assert job.cells == {
        Cell(0, 0): [0, 1, 2, 3],
        Cell(0, 1): [8, 9, 10, 11],
        Cell(1, 0): [4, 5, 6, 7],
        Cell(1, 1): [12, 13, 14, 15],
    }
    assert (job.cell, job.workers[9].lane, job.pipeline) == (Cell(0, 1), 1, [1, 9])
    assert (job.replicas, job.reporters) == (2, [0, 1, 2, 3, 8, 9, 10, 11]), "and they are planned for together"


def test_tensor_and_context_parallel_peers_are_one_cell() -> None:
    # Two stages of 2 x 2 ranks: tensor-parallel pairs, context-parallel ones across them.
    pipelines = [[rank, rank + 4] for rank in range(4)]
    joined = [[0, 1], [2, 3], [0, 2], [1, 3], [4, 5], [6, 7], [4, 6], [5, 7]]
    assert layout(pipelines, 6, joined=joined).cells == {Cell(0, 0): [0, 1, 2, 3], Cell(0, 1): [4, 5, 6, 7]}


@given(st.lists(st.frozensets(st.integers(0, 11), min_size=1), max_size=6))
def test_every_rank_finds_the_same_cells(groups: list[frozenset[int]]) -> None:
    found = [layout([[rank] for rank in range(12)], rank, joined=list(map(sorted, groups))) for rank in range(12)]
    assert all(job.cells == found[0].cells for job in found)
    for group in groups:
        assert len({found[member].cell for member in group}) == 1


def test_only_ranks_of_one_host_share_a_clock() -> None:
    job = layout([[0, 1, 2]], 1, hosts=["here", "here", "there"])
    assert job.share_clock((0, 1))
    assert not job.share_clock((0, 1, 2))
    assert job.name(2) == "rank 2 (stage 2 on a host)"


def test_containers_of_one_host_may_have_networks_of_their_own() -> None:
    job = layout([[0, 1, 2]], 1, hosts=["here/one", "here/one", "here/other"])
    assert job.share_clock((0, 1, 2))
    assert job.share_network((0, 1))
    assert not job.share_network((0, 1, 2))


@pytest.mark.parametrize("first", [0, 5])
def test_the_first_rank_leads(first: int) -> None:
    assert layout([[first + 1, first]], first).leader == first
