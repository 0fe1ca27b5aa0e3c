# SPDX-License-Identifier: Apache-2.0
"""When an iteration is over, whatever the order in which reports come, and whichever are lost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.control.sidecar.planner_connections import MOST_AWAITED, Gathering

RANKS = (3, 4, 8)


def test_an_iteration_is_over_when_all_have_reported_it() -> None:
    gathering = Gathering(RANKS)
    gathering.expect(5)
    assert not gathering.add(8, 5, b"8")
    assert not gathering.add(8, 5, b"8"), "twice is once"
    assert not gathering.add(3, 5, b"3")
    assert (gathering.awaited, gathering.missing, gathering.take()) == (5, [4], [])
    assert gathering.add(4, 5, b"4")
    ((iteration, reports, lost),) = gathering.take()
    assert (iteration, dict(reports), lost) == (5, {3: b"3", 4: b"4", 8: b"8"}, [])
    assert (gathering.awaited, gathering.take()) == (None, [])


def test_a_rank_that_never_reports_costs_no_memory() -> None:
    gathering, taken = Gathering(RANKS), []
    for iteration in range(3 * MOST_AWAITED):
        gathering.expect(iteration)
        gathering.add(3, iteration, b"3")
        gathering.add(8, iteration, b"8")
        taken += gathering.take()
        assert len(gathering._reports) <= MOST_AWAITED
    assert [(each.iteration, each.lost) for each in taken] == [(each, [4]) for each in range(2 * MOST_AWAITED)]
    gathering.add(4, 3 * MOST_AWAITED, b"4")
    assert [each.iteration for each in gathering.take()] == list(range(2 * MOST_AWAITED, 3 * MOST_AWAITED))


@given(st.integers(0, 2**32), st.integers(1, 6), st.data())
def test_every_iteration_is_taken_once_and_what_is_lost_is_named(
    seed: int, iterations: int, data: st.DataObject
) -> None:
    """Reports of each rank come in order, mixed with others', the last of none is lost."""
    everything = [(rank, iteration) for rank in RANKS for iteration in range(iterations - 1)]
    lost = data.draw(st.sets(st.sampled_from(everything))) if everything else set()
    pending = {rank: [each for each in range(iterations) if (rank, each) not in lost] for rank in RANKS}
    gathering, taken, chance, expected = Gathering(RANKS), [], random.Random(seed), 0
    while expected < iterations or any(pending.values()):
        if expected < iterations and (chance.random() < 0.3 or not any(pending.values())):
            gathering.expect(expected)
            expected += 1
        else:
            rank = chance.choice([rank for rank, left in pending.items() if left])
            gathering.add(rank, pending[rank].pop(0), b"%d" % rank)
        taken += gathering.take()
    assert [each.iteration for each in taken] == list(range(iterations))
    for each in taken:
        assert {(rank, each.iteration) for rank in each.lost} == {one for one in lost if one[1] == each.iteration}
        assert dict(each.reports) == {rank: b"%d" % rank for rank in RANKS if rank not in each.lost}
