# SPDX-License-Identifier: Apache-2.0
"""Which generation follows from whom the launcher has lost, and from who stands ready again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Arrival, Departure, Membership, Readiness
from adaptra_megatron.elastic.failure_errors import UnrecoverableError
from adaptra_megatron.elastic.generation import (
    Generation,
    GenerationId,
    after_failures,
    can_admit,
    live_ranks,
    rejoining,
    with_rejoining,
)


def layout(rank: int) -> JobLayout:
    """Two replicas of two stages, each cell with two lanes: rank 4 * stage + 2 * replica + lane."""
    places = {each: (Cell(each // 2 % 2, each // 4), each % 2) for each in range(8)}
    return JobLayout(rank, {each: Worker(cell, lane, "host", "boot/net") for each, (cell, lane) in places.items()})


def membership(*left: tuple[int, int], arrived: tuple[tuple[int, int], ...] = ()) -> Membership:
    """`left`: ranks, each with the first membership epoch without it; `arrived`: with the first with it again."""
    departures = tuple(Departure(rank, epoch, "host", "was killed by SIGKILL", 0.0) for rank, epoch in left)
    arrivals = tuple(Arrival(rank, epoch, Readiness(1, 1, "host", "boot/net")) for rank, epoch in arrived)
    return Membership(max(epoch for _, epoch in (*left, *arrived)), 8, 0.0, departures, arrivals)


BEGINNING = Generation(GenerationId(0), frozenset(range(8)), frozenset())


def generation(rank: int, *left: tuple[int, int], before: Generation = BEGINNING) -> Generation:
    return after_failures(layout(rank), membership(*left), before)


def test_ranks_that_look_between_the_failures_of_two_lanes_of_a_cell_come_to_the_same_generation() -> None:
    early, late = generation(0, (2, 1)), generation(0, (2, 1), (3, 2))
    assert early.id == late.id == GenerationId(1)
    assert early.live == late.live == {0, 1, 4, 5, 6, 7}
    assert early.dead_cells == {Cell(1, 0)}


def test_another_cell_makes_another_generation() -> None:
    assert generation(0, (2, 1), (3, 2), (5, 3)).id == GenerationId(3)
    assert generation(0, (2, 1), (5, 2), (3, 3)).id == GenerationId(2)
    assert live_ranks(layout(0), membership((2, 1), (5, 2)), {}) == {0, 1, 6, 7}


def test_a_stage_without_cells_and_a_cell_without_a_lane_have_no_generation() -> None:
    with pytest.raises(UnrecoverableError, match=r"all 2 cells of stage 0 are dead.*restart from the last checkpoint"):
        generation(4, (2, 1), (1, 2))
    with pytest.raises(UnrecoverableError, match=r"rank 3 .* cannot take part in the job any more"):
        generation(3, (2, 1))


def test_ranks_that_were_admitted_again_live_until_they_fail_once_more() -> None:
    whole = replace(BEGINNING, id=GenerationId(3, 7), admitted={2: 2, 3: 3}, least=3)
    left = (2, 1), (3, 1)
    assert live_ranks(layout(0), membership(*left), {2: 2}) == {0, 1, 4, 5, 6, 7}, "a lane is missing"
    assert live_ranks(layout(0), membership(*left), whole.admitted) == set(range(8))
    others = generation(0, *left, (5, 4), before=whole)
    assert (others.id, others.dead_cells, others.least) == (GenerationId(4), {Cell(0, 1)}, 3)
    again = generation(0, *left, (3, 5), before=whole)
    assert (again.id, again.dead_cells) == (GenerationId(5), {Cell(1, 0)})


DEAD = generation(0, (2, 1), (3, 2))
"""Two lanes of a cell have failed."""


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        (membership((2, 1), (3, 2)), set()),
        (membership((2, 1), (3, 2), arrived=((2, 3),)), set()),
        (membership((2, 1), (3, 2), arrived=((2, 3), (3, 4))), {2, 3}),
        (membership((2, 1), (3, 2), (3, 5), arrived=((2, 3), (3, 4))), set()),
        (membership((2, 1), arrived=((2, 3),)), set()),
        (membership((2, 1), (3, 2), (6, 7), arrived=((2, 3), (3, 4), (6, 8))), {2, 3}),
    ],
    ids=["none", "one-lane", "both", "one-failed-again", "the-other-is-about-to-end", "half-of-another-cell"],
)
def test_those_rejoin_whose_whole_cells_stand_ready(found: Membership, ranks: set[int]) -> None:
    assert rejoining(layout(0), found, DEAD).keys() == ranks


def test_an_arrival_rejoins_once_and_not_after_it_came_too_late() -> None:
    found = membership((2, 1), (3, 2), arrived=((2, 3), (3, 4)))
    admitted = with_rejoining(layout(0), found, DEAD, 5)
    assert admitted.live == frozenset(range(8))
    assert not rejoining(layout(0), found, admitted)
    late = replace(DEAD, refused={2: 3})
    assert not can_admit(layout(0), found, late)
    assert can_admit(layout(0), membership((2, 1), (3, 2), (2, 5), arrived=((3, 4), (2, 6))), late)


def test_an_admission_shares_its_identity_neither_with_the_failure_before_nor_with_another_admission() -> None:
    """Rank 5 failed after rank 2 stood ready: the newest membership is that of the generation that runs."""
    running = generation(0, (2, 1), (3, 1), (5, 4))
    found = membership((2, 1), (3, 1), (5, 4), arrived=((2, 2), (3, 3)))
    admissions = [with_rejoining(layout(0), found, running, call) for call in (6, 7)]
    identities = [
        running.id,
        *(each.id for each in admissions),
        generation(0, (2, 1), (3, 1), (5, 4), (2, 5), before=admissions[0]).id,
    ]
    assert running.id == GenerationId(found.epoch)
    assert identities == sorted(set(identities))
