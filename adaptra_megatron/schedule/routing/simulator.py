# SPDX-License-Identifier: Apache-2.0
"""How long a routed schedule takes: exact replay of fixed orders of cells.

A cell runs its actions one after another. F needs its activation from the cell that ran the micro-batch at the stage
before, a backward its gradient from the cell of the stage after, W its own I. Between any two cells there is one
directed link, which carries messages in the order in which they were handed over: each starts when the link is free,
keeps it busy for `occupancy_s` and arrives `latency_s` after that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.native import encode_hosts, encode_orders, problem_from_routed
from adaptra_megatron.schedule.routing.plans import RoutedAction, RoutedSchedule
from adaptra_megatron.schedule.simulator import SimulationError, Times


@dataclass(frozen=True, kw_only=True)
class RoutedSimulation:
    """One iteration of a routed job: `start_s[cell][k]`, `end_s[cell][k]` are seconds of `schedule.orders[cell][k]`."""

    schedule: RoutedSchedule
    makespan_s: float
    """Until the last action has ended."""
    period_s: float
    """Until the last stage has synchronised; with staggered stages, the longest time that one stage is at work."""
    start_s: Times
    end_s: Times
    peak_in_flight: tuple[float, ...]
    """Most activations each cell holds at once."""


def simulate_routed(schedule: RoutedSchedule, costs: RoutedCosts) -> RoutedSimulation:
    """Replay the fixed orders of `schedule`; caps are not enforced.

    Raises SimulationError if the schedule does not fit `costs`, or if its orders deadlock: the message names cells and
    the actions that wait.
    """
    routing = schedule.routing
    shape = (len(costs.replicas), costs.stages, costs.micro_batches)
    if (routing.replicas, schedule.stages, routing.micro_batches) != shape or len(schedule.orders) != len(costs.cells):
        raise SimulationError(
            f"the schedule is of {routing.replicas} replicas, {schedule.stages} stages and {routing.micro_batches} "
            f"micro-batches with {len(schedule.orders)} orders, the costs of {shape[0]}, {shape[1]} and {shape[2]}"
        )
    for stage, row in enumerate(routing.hosts):
        for host in set(row):
            if not 0 <= host < shape[0] or Cell(host, stage) in costs.dead:
                raise SimulationError(f"micro-batches are routed to cell {Cell(host, stage)}, which takes no work")
    found = _native.replay_routed(problem_from_routed(costs), encode_hosts(routing), encode_orders(schedule))
    if math.isinf(found["makespan_s"]):
        raise SimulationError(_describe_deadlock(schedule, costs, found["position"]))
    return routed_simulation(schedule, costs, found)


def routed_simulation(schedule: RoutedSchedule, costs: RoutedCosts, found: _native.RoutedTimes) -> RoutedSimulation:
    """What native times of `schedule` say."""
    cells = zip(costs.cells, schedule.orders, strict=True)
    return RoutedSimulation(
        schedule=schedule,
        makespan_s=found["makespan_s"],
        period_s=found["period_s"],
        start_s=tuple(map(tuple, found["start_s"])),
        end_s=tuple(map(tuple, found["end_s"])),
        peak_in_flight=tuple(
            peak_of(order, costs.replicas[cell.replica].released_at_backward_input[cell.stage]) for cell, order in cells
        ),
    )


def peak_of(order: Sequence[RoutedAction], released: float) -> float:
    """Most activations held at once: F takes 1, I gives `released` back (below 0: takes more), W the rest, B all."""
    forwards = inputs = weights = 0
    peak = 0.0
    for action in order:
        forwards += action.kind is Kind.FORWARD
        inputs += action.kind.sends_gradient
        weights += action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        peak = max(peak, forwards - (released * inputs + (1.0 - released) * weights))
    return peak


def _describe_deadlock(schedule: RoutedSchedule, costs: RoutedCosts, position: Sequence[int]) -> str:
    waiting = (
        f"cell {cell} waits with {order[at]}"
        for cell, order, at in zip(costs.cells, schedule.orders, position, strict=True)
        if at < len(order)
    )
    return "the orders wait on each other for ever: " + "; ".join(waiting)
