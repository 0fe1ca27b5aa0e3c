# SPDX-License-Identifier: Apache-2.0
"""What the leading rank decides on routes, and says of them, for cells of known speeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.control.deciders.decider import Context
from adaptra_megatron.control.deciders.route_decider import MOST_SHOWN, RouteDecider, cell_figures
from adaptra_megatron.control.decisions import Moved, PackedFigures
from adaptra_megatron.control.detector.observations import Estimates, StageEstimate, StageId, State
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar.planner_client import RoutePolicy
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.routing.routed_plans import Move
from adaptra_megatron.telemetry.events import RoutesChosen
from adaptra_megatron.telemetry.scalars import CellFigures, JobFigures, RankFigures, scalars

REPLICAS, STAGES, MICRO_BATCHES = 2, 2, 8


class Said:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def log(self, event: Any) -> None:
        self.events.append(event)

    def requests(self) -> tuple[()]:
        return ()


def context(factors: Mapping[Cell, float], number: int = 0) -> Context:
    """Every F, I and W takes a second, at some cells so many times as long. Pipelines are named by their replica."""
    stages = {
        StageId(replica, stage): StageEstimate(
            durations_s={(kind, 0): factors.get(Cell(replica, stage), 1.0) for kind in "FIW"},
            state=State.HEALTHY,
            since_iteration=0,
            reason="",
        )
        for replica in range(REPLICAS)
        for stage in range(STAGES)
    }
    costs = uniform_costs(STAGES, MICRO_BATCHES, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    latest = StageMeasurement(0, 0, 5, MICRO_BATCHES)
    return Context([latest], Estimates({}, stages), [], {}, number, lambda _: costs)


def test_a_slow_cell_gives_and_all_that_is_shown_says_so() -> None:
    said = Said()
    decider = RouteDecider(RoutePolicy(pipelines=((0,), (1,))), STAGES, said)
    assert decider.figures() is None
    assert decider.decide(context({})) is None
    figures = decider.figures()
    assert figures is not None
    assert set(figures.cells.values()) == {CellFigures(speed=1.0)}
    assert figures.predicted_gain_s is None

    routing = decider.decide(context({Cell(0, 1): 2.5}))
    assert routing is not None
    (moved,) = routing.moved
    assert moved[:3] == Moved(1, 0, 1, 0)[:3]
    (event,) = said.events
    assert isinstance(event, RoutesChosen)
    assert event.speeds == {"0.0": 1.0, "0.1": 0.4, "1.0": 1.0, "1.1": 1.0}
    assert (event.slow, event.micro_batches) == ({"0.1": 2.5}, MICRO_BATCHES)
    figures = decider.figures()
    assert figures is not None
    assert figures.cells[0, 1] == CellFigures(speed=0.4, given=moved.micro_batches)
    assert figures.cells[1, 1] == CellFigures(speed=1.0, taken=moved.micro_batches)
    assert figures.predicted_gain_s == pytest.approx((event.current_predicted_s or 0.0) - (event.predicted_s or 0.0))
    assert figures.predicted_gain_s > 0
    job = JobFigures(routes=figures)
    assert PackedFigures.of(job).unpacked() == job
    shown = scalars(RankFigures(iteration_s=1.0, peak_in_flight=1.0, plan_number=1), job)
    assert (shown["adaptra/slowest_cell_speed"], shown["adaptra/micro_batches_routed"]) == (0.4, moved.micro_batches)

    home = decider.decide(context({}, number=1))
    assert home is not None
    assert (home.number, home.moved) == (0, ())
    figures = decider.figures()
    assert figures is not None
    assert (figures.cells[0, 1], figures.predicted_gain_s) == (CellFigures(speed=1.0), None)


@pytest.mark.parametrize(("factor", "moves"), [(1.5, {1}), (4.0, set())])
def test_a_pinned_stage_keeps_its_micro_batches_however_slow_a_cell_of_it_is(factor: float, moves: set[int]) -> None:
    decider = RouteDecider(RoutePolicy(pipelines=((0,), (1,)), pinned=(0,)), STAGES, Said())
    routing = decider.decide(context({Cell(0, 0): factor, Cell(0, 1): 2.5}))
    assert routing is not None
    assert {move.stage for move in routing.moved} == moves
    assert routing.slowness == (() if moves else (4.0, 1.0))


def test_where_nothing_can_be_routed_ranks_get_to_know_how_slow_replicas_are() -> None:
    pinned = RoutePolicy(pipelines=((0,), (1,)), pinned=tuple(range(STAGES)))
    decider = RouteDecider(pinned, STAGES, Said())
    reported = [decider.decide(context({Cell(1, 0): factor})) for factor in (1.1, 2.0, 2.1, 3.0, 1.0, 1.0)]
    assert [None if each is None else (each.number, each.slowness) for each in reported] == [
        *(None, (0, (1.0, 2.0)), None, (0, (1.0, 3.0)), (0, (1.0, 1.0)), None),
    ]
    later = RouteDecider(pinned, STAGES, Said(), reported[3])
    assert later.decide(context({Cell(1, 0): 3.0})) is None, "it goes on where another has ended"


def test_figures_of_large_jobs_are_of_the_cells_that_matter() -> None:
    speeds = {Cell(replica, 0): 1.0 for replica in range(MOST_SHOWN + 1)} | {Cell(7, 0): 0.5}
    moves = [Move(Cell(7, 0), Cell(9, 0), (0, 1)), Move(Cell(7, 0), Cell(4, 0), (2,))]
    assert cell_figures(speeds, moves) == {
        (4, 0): CellFigures(speed=1.0, taken=1),
        (7, 0): CellFigures(speed=0.5, given=3),
        (9, 0): CellFigures(speed=1.0, taken=2),
    }
    assert len(cell_figures(dict.fromkeys(list(speeds)[:MOST_SHOWN], 1.0), [])) == MOST_SHOWN
