# SPDX-License-Identifier: Apache-2.0
"""What the leading rank decides while cells are dead: routes round these, planned anew as what lives changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.control.deciders.decider import Context
from adaptra_megatron.control.deciders.route_decider import LiveCellDecider, cell_orders, moved_by, schedule_of
from adaptra_megatron.control.decisions import RoutingSection
from adaptra_megatron.control.detector.observations import Estimates, StageEstimate, StageId, State
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar.planner_client import RoutePolicy
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.schedule.routing.routed_simulator import check_routed
from adaptra_megatron.telemetry.events import RoutesChosen

REPLICAS, STAGES, MICRO_BATCHES = 3, 2, 6
DEAD = Cell(1, 0)
POLICY = RoutePolicy(pipelines=((0,), (1,), (2,)), dead=(DEAD,))
COSTS = uniform_costs(
    STAGES, MICRO_BATCHES, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, max_in_flight=6
)


class Said:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def log(self, event: Any) -> None:
        self.events.append(event)

    def requests(self) -> tuple[()]:
        return ()


def context(
    factors: Mapping[Cell, float] | None = None,
    *,
    latency_s: float = 0.0,
    cap: float = 6.0,
    micro_batches: int = MICRO_BATCHES,
) -> Context:
    """Every F, I and W of a live cell takes a second, at some so many times as long."""
    slow = factors or {}
    stages = {
        StageId(replica, stage): StageEstimate(
            durations_s={(kind, 0): slow.get(Cell(replica, stage), 1.0) for kind in "FIW"},
            state=State.HEALTHY,
            since_iteration=0,
            reason="",
        )
        for replica in range(REPLICAS)
        for stage in range(STAGES)
        if Cell(replica, stage) != DEAD
    }
    slowest = tuple(
        (max(slow.get(Cell(replica, stage), 1.0) for replica in range(REPLICAS)),) for stage in range(STAGES)
    )
    costs = replace(
        COSTS,
        micro_batches=micro_batches,
        forward_s=slowest,
        backward_input_s=slowest,
        backward_weight_s=slowest,
        links={(0, 1): LinkCost(latency_s), (1, 0): LinkCost(latency_s)},
        max_in_flight=(cap,) * STAGES,
    )
    latest = StageMeasurement(0, 0, 5, micro_batches)
    return Context([latest], Estimates({}, stages), [], {}, 0, lambda _: costs)


def running(number: int = 1, *, cap: float = 6.0) -> RoutingSection:
    """What live cells run before anything of them has been measured."""
    costs = replace(COSTS, max_in_flight=(cap,) * STAGES)
    plan = plan_routed(RoutedCosts(job=JobCosts(costs, replicas=REPLICAS), dead=frozenset({DEAD})))
    return RoutingSection(number, MICRO_BATCHES, moved_by(plan.routing), cell_orders(plan.simulation, costs))


def check_routes(routing: RoutingSection) -> None:
    """All that it says can run, without the dead cell."""
    schedule = schedule_of(routing.orders, REPLICAS, STAGES, routing.micro_batches)
    costs = replace(COSTS, micro_batches=routing.micro_batches)
    check_routed(schedule, RoutedCosts(job=JobCosts(costs, replicas=REPLICAS), dead=frozenset({DEAD})))
    assert not schedule.order(DEAD)
    assert moved_by(schedule.routing) == routing.moved


def test_what_runs_stays_until_a_live_cell_or_a_link_turns_slow() -> None:
    said = Said()
    decider = LiveCellDecider(POLICY, STAGES, said, running(4))
    calm = context()
    assert decider.decide(calm) is None
    assert calm.routed, "no pipeline's own order counts"
    assert decider.decide(context(latency_s=0.05)) is None

    slow = context({Cell(0, 0): 3.0})
    routing = decider.decide(slow)
    assert routing is not None
    assert routing.number == 5
    check_routes(routing)
    given_away = sum(move.micro_batches for move in routing.moved if (move.stage, move.source) == (0, 0))
    assert given_away >= MICRO_BATCHES / 3, "the third cell of the stage, which is alone as fast, has more to do"
    assert slow.reasons == ["F of stage 0, chunk 0: 3000.0 ms instead of 1000.0 ms"]
    assert decider.decide(context({Cell(0, 0): 3.0})) is None

    late = decider.decide(context({Cell(0, 0): 3.0}, latency_s=4.0))
    assert late is not None
    check_routes(late)
    events = [event for event in said.events if isinstance(event, RoutesChosen)]
    assert [event.slow for event in events] == [{"0.0": 3.0}] * 2
    assert events[0].speeds == {"0.0": 0.3333, "0.1": 1.0, "1.1": 1.0, "2.0": 1.0, "2.1": 1.0}
    assert all((event.predicted_s or 0.0) < 0.95 * (event.current_predicted_s or 0.0) for event in events)
    figures = decider.figures()
    assert figures is not None
    assert (0, 0) in figures.cells
    assert (1, 0) not in figures.cells


def test_slow_cells_keep_their_work_where_routes_lead_round_dead_ones_alone() -> None:
    decider = LiveCellDecider(replace(POLICY, avoids_slow=False), STAGES, Said(), running())
    assert decider.decide(context()) is None
    routing = decider.decide(context({Cell(0, 0): 3.0}, latency_s=4.0))
    assert routing is not None, "orders are planned by what is slow all the same"
    assert {(move.stage, move.source) for move in routing.moved} == {(0, 1)}


def test_other_iterations_and_less_memory_get_routes_of_their_own() -> None:
    decider = LiveCellDecider(POLICY, STAGES, Said(), running())
    assert decider.decide(context()) is None
    more = decider.decide(context(micro_batches=MICRO_BATCHES + 2))
    assert more is not None
    assert more.micro_batches == MICRO_BATCHES + 2
    check_routes(more)
    roomy = LiveCellDecider(POLICY, STAGES, Said(), running())
    assert roomy.decide(context(cap=6.0)) is None
    tight = roomy.decide(context(cap=2.0))
    assert tight is not None, "what runs would hold more"
    schedule = schedule_of(tight.orders, REPLICAS, STAGES, MICRO_BATCHES)
    costs = replace(COSTS, max_in_flight=(2.0,) * STAGES)
    check_routed(schedule, RoutedCosts(job=JobCosts(costs, replicas=REPLICAS), dead=frozenset({DEAD})))


def test_a_planner_that_does_not_know_what_runs_plans_at_once() -> None:
    routing = LiveCellDecider(POLICY, STAGES, Said(), None).decide(context())
    assert routing is not None
    check_routes(routing)


def test_live_cells_have_routes_where_gpus_have_one_hardware_queue() -> None:
    one_queue = context()
    assert one_queue.costs is not None
    one_queue.costs = replace(one_queue.costs, shared_queue=True, serial_queue=True)
    routing = LiveCellDecider(POLICY, STAGES, Said(), None).decide(one_queue)
    assert routing is not None
    check_routes(routing)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), st.integers(1, 4), st.data())
def test_orders_that_have_travelled_are_the_schedule_that_they_are_of(
    replicas: int, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    cells = [Cell(replica, stage) for replica in range(1, replicas) for stage in range(stages)]
    dead = frozenset(data.draw(st.lists(st.sampled_from(cells), max_size=2)))
    costs = uniform_costs(stages, micro_batches, forward_s=1.0, backward_input_s=2.0, backward_weight_s=1.0)
    plan = plan_routed(RoutedCosts(job=JobCosts(costs, replicas=replicas), dead=dead), deadline_s=0.01)
    assert schedule_of(cell_orders(plan.simulation, costs), replicas, stages, micro_batches) == plan.schedule
