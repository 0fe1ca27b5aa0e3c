# SPDX-License-Identifier: Apache-2.0
"""Which epoch follows from whom the launcher has lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from adaptra_megatron.epochs.epoch import Epoch, epoch_of, live_ranks
from adaptra_megatron.epochs.errors import UnrecoverableError
from adaptra_megatron.job.layout import JobLayout, Worker
from adaptra_megatron.job.membership import Departure, Membership
from adaptra_megatron.schedule.routing.costs import Cell


class Control:
    """A ControlStore that makes none."""

    def in_epoch(self, epoch: int) -> Control:
        return self


def layout(rank: int) -> JobLayout:
    """Two replicas of two stages, each cell with two lanes: rank 4 * stage + 2 * replica + lane."""
    places = {each: (Cell(each // 2 % 2, each // 4), each % 2) for each in range(8)}
    return JobLayout(rank, {each: Worker(cell, lane, "host", "boot/net") for each, (cell, lane) in places.items()})


def membership(*left: tuple[int, int]) -> Membership:
    """`left`: ranks, each with the first epoch without it."""
    departures = tuple(Departure(rank, epoch, "host", "was killed by SIGKILL", 0.0) for rank, epoch in left)
    return Membership(max(epoch for _, epoch in left), 8, 0.0, departures)


BEGINNING = Epoch(0, frozenset(range(8)), frozenset(), cast(Any, Control()))


def epoch(rank: int, *left: tuple[int, int], before: Epoch = BEGINNING) -> Any:
    return epoch_of(layout(rank), cast(Any, Control()), membership(*left), before)


def test_ranks_that_look_between_the_deaths_of_two_lanes_of_a_cell_come_to_the_same_epoch() -> None:
    early, late = epoch(0, (2, 1)), epoch(0, (2, 1), (3, 2))
    assert early.number == late.number == 1
    assert early.live == late.live == {0, 1, 4, 5, 6, 7}
    assert early.dead_cells == {Cell(1, 0)}


def test_another_cell_makes_another_epoch() -> None:
    assert epoch(0, (2, 1), (3, 2), (5, 3)).number == 3
    assert epoch(0, (2, 1), (5, 2), (3, 3)).number == 2
    assert live_ranks(layout(0), membership((2, 1), (5, 2)), {}) == {0, 1, 6, 7}


def test_a_stage_without_cells_and_a_cell_without_a_lane_have_no_epoch() -> None:
    with pytest.raises(UnrecoverableError, match=r"all 2 cells of stage 0 are dead.*restart from the last checkpoint"):
        epoch(4, (2, 1), (1, 2))
    with pytest.raises(UnrecoverableError, match=r"rank 3 .* has no part in the job any more"):
        epoch(3, (2, 1))


def test_ranks_that_were_admitted_again_live_until_they_leave_once_more() -> None:
    whole = replace(BEGINNING, number=3, admitted={2: 2, 3: 3}, least=3)
    left = (2, 1), (3, 1)
    assert live_ranks(layout(0), membership(*left), {2: 2}) == {0, 1, 4, 5, 6, 7}, "a lane is missing"
    assert live_ranks(layout(0), membership(*left), whole.admitted) == set(range(8))
    others = epoch(0, *left, (5, 4), before=whole)
    assert (others.number, others.dead_cells, others.least) == (4, {Cell(0, 1)}, 3)
    again = epoch(0, *left, (3, 5), before=whole)
    assert (again.number, again.dead_cells) == (5, {Cell(1, 0)})


def test_an_epoch_has_no_number_of_one_before_the_last_admission() -> None:
    """Rank 0's cell died first, and that of rank 2 came back: those that live are those of the first epoch."""
    before = replace(BEGINNING, number=4, admitted={2: 4, 3: 4}, least=4)
    assert epoch(4, (0, 1), (2, 2), (3, 2), before=before).number == 4
