# SPDX-License-Identifier: Apache-2.0
"""Every schedule sums up completely, within its ports and in the fewest rounds."""

from __future__ import annotations

import math

import pytest
from gradsync.all_reduce.replay import replay
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, RoundPhase, Transfer, hidden, ring
from adaptra_megatron.gradsync.stragglar import has_stragglar, stragglar, stragglar_rounds
from adaptra_megatron.schedule.ir import ScheduleError

LONGER: frozenset[int] = frozenset({63})
"""Numbers of ranks for which a round more than the fewest was found."""


@pytest.mark.parametrize("ranks", [*range(2, 65), 128])
def test_stragglar_is_complete_in_the_fewest_rounds(ranks: int) -> None:
    plan = stragglar(ranks)
    replay(plan)
    assert len(plan.together.rounds) == stragglar_rounds(ranks)
    assert stragglar_rounds(ranks) == ranks + math.ceil(math.log2(ranks)) - 2 + (ranks in LONGER)
    assert len(plan.waiting.rounds) == max(0, ranks - 2)


@pytest.mark.parametrize("ranks", range(2, 65))
def test_chunks_are_completed_by_one_exchange_each(ranks: int) -> None:
    """Both ends of an exchange add, so all copies come of sums that are equal to the bit."""
    adding = [each for each in sum(stragglar(ranks).together.rounds, ()) if each.adds]
    fast = ranks - 1
    assert sorted(adding) == sorted(
        [Transfer(chunk, fast, chunk, True) for chunk in range(fast)]
        + [Transfer(fast, chunk, chunk, True) for chunk in range(fast)]
    )


@given(st.integers(2, 24), st.integers(1, 40))
def test_the_hidden_all_reduce_is_complete(ranks: int, chunks: int) -> None:
    plan = hidden(ranks, chunks)
    replay(plan)
    assert len(plan.together.rounds) == chunks + ranks - 2
    assert len(plan.waiting.rounds) == 2 * (ranks - 2)


@given(st.integers(2, 24))
def test_a_ring_is_complete(ranks: int) -> None:
    replay(ring(ranks))
    assert len(ring(ranks).together.rounds) == 2 * (ranks - 1)


@given(st.integers(2, 40), st.integers(0, 1000))
def test_chunks_cover_every_element_once_and_are_alike(chunks: int, elements: int) -> None:
    phase = RoundPhase(chunks, ())
    bounds = [phase.bounds(chunk, elements) for chunk in range(chunks)]
    assert [element for first, end in bounds for element in range(first, end)] == list(range(elements))
    sizes = {end - first for first, end in bounds}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 32), st.data())
def test_the_steps_of_all_ranks_are_the_rounds(ranks: int, data: st.DataObject) -> None:
    phase = data.draw(st.sampled_from([stragglar(ranks), hidden(ranks, 5), ring(ranks)])).together
    sends = [step.sends for rank in range(ranks) for step in phase.steps(rank) if step.sends]
    receives = [step.receives for rank in range(ranks) for step in phase.steps(rank) if step.receives]
    assert sorted(sends) == sorted(receives) == sorted(sum(phase.rounds, ()))


def test_what_there_is_no_schedule_for_is_refused() -> None:
    assert not has_stragglar(65)
    for refused in (lambda: stragglar(65), lambda: stragglar_rounds(96), lambda: stragglar(1), lambda: ring(0)):
        with pytest.raises(ScheduleError):
            refused()


@pytest.mark.parametrize(
    "transfers",
    [
        (Transfer(0, 1, 0, True), Transfer(0, 2, 0, True)),
        (Transfer(0, 2, 0, True), Transfer(1, 2, 0, True)),
        (Transfer(0, 1, 0), Transfer(1, 0, 0)),
    ],
    ids=["sends twice", "receives twice", "is incomplete"],
)
def test_the_replay_sees_what_is_wrong(transfers: tuple[Transfer, ...]) -> None:
    with pytest.raises(AssertionError):
        replay(AllReduce(3, RoundPhase(1, ()), RoundPhase(1, (transfers,))))
