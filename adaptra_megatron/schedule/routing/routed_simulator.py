# SPDX-License-Identifier: Apache-2.0
"""Simulate a routed schedule: exact replay of fixed orders of cells.

A cell runs its actions one after another. F needs its activation from the cell that ran the micro-batch at the stage
before, a backward its gradient from the cell of the stage after, W its own I. Between any two cells there is one
directed link, which carries messages in the order in which they were handed over: each starts when the link is free,
keeps it busy for `occupancy_s` and arrives `latency_s` after that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import LinkCost
from adaptra_megatron.schedule.ir import Kind, ScheduleError
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts, seconds_of_cells
from adaptra_megatron.schedule.routing.routed_plans import RoutedAction, RoutedSchedule, Routing
from adaptra_megatron.schedule.simulator import SimulationError, Times

# An action of a known cell is one number: number of its micro-batch in the job * 4 + index of its kind here.
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_INDEX_OF_KIND = {kind: index for index, kind in enumerate(_KINDS)}
_TABLES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
"""Tables in the order of the kinds of actions."""


def problem_from_routed(costs: RoutedCosts) -> _native.RoutedProblem:
    """Return the native form of `costs`."""
    replicas, cells = costs.replicas, costs.cells
    tables = [seconds_of_cells(replicas, name) for name in _TABLES]
    own = [
        _alone(replicas[cell.replica].link(cell.stage, cell.stage + step))
        if 0 <= cell.stage + step < costs.stages
        else (0.0, 0.0)
        for cell in cells
        for step in (1, -1)
    ]
    number = {cell: index for index, cell in enumerate(cells)}
    caps = (replicas[cell.replica].max_in_flight[cell.stage] for cell in cells)
    return _native.RoutedProblem(
        replicas=len(replicas),
        stages=costs.stages,
        micro_batches=costs.micro_batches,
        per_cell=[table[cell.replica][cell.stage] for cell in cells for table in tables],
        factor=_factors(costs),
        whole_given=replicas[0].backward_s is not None,
        live=[cell not in costs.dead for cell in cells],
        cap=[math.inf if cap is None else cap for cap in caps],
        released=[replicas[cell.replica].released_at_backward_input[cell.stage] for cell in cells],
        own_latency=[latency_s for latency_s, _ in own],
        own_occupancy=[occupancy_s for _, occupancy_s in own],
        given=[(number[source], number[target], *_alone(link)) for (source, target), link in costs.links.items()],
        sync=costs.job.gradient_sync_s,
        staggered=costs.staggered,
        pinned=[stage in costs.pinned for stage in range(costs.stages)],
    )


def encode_hosts(routing: Routing) -> list[int]:
    """Return the replica of each stage and micro-batch, stage by stage."""
    return [host for row in routing.hosts for host in row]


def decode_hosts(hosts: Sequence[int], costs: RoutedCosts) -> Routing:
    """Return the routing that native host numbers represent."""
    count = costs.job_micro_batches
    rows = (tuple(hosts[stage * count : (stage + 1) * count]) for stage in range(costs.stages))
    return Routing(costs.job.replicas, costs.micro_batches, tuple(rows))


def encode_orders(schedule: RoutedSchedule) -> list[list[int]]:
    """Return the integer codes of all cells' orders."""
    count = schedule.routing.micro_batches
    return [
        [(replica * count + micro_batch) * 4 + _INDEX_OF_KIND[kind] for kind, replica, micro_batch, _ in order]
        for order in schedule.orders
    ]


def decode_orders(codes: Sequence[Sequence[int]], micro_batches: int) -> tuple[tuple[RoutedAction, ...], ...]:
    """Return the orders that the cells' codes represent."""
    made = RoutedAction._make
    return tuple(
        tuple(made((_KINDS[code & 3], *divmod(code >> 2, micro_batches), 0)) for code in order) for order in codes
    )


def _alone(link: LinkCost) -> tuple[float, float]:
    """Return latency and occupancy; a rendezvous link is occupied for both."""
    return (0.0, link.transfer_s) if link.rendezvous else (link.latency_s, link.occupancy_s)


def _factors(costs: RoutedCosts) -> list[float]:
    """Return the factor of each kind, stage and micro-batch of the job; empty if all micro-batches cost the same."""
    if not any(each.micro_batch_factors for each in costs.replicas):
        return []
    return [
        factor
        for name in _TABLES
        for stage in range(costs.stages)
        for each in costs.replicas
        for factor in each.factors_of(name, stage, 0)
    ]


@dataclass(frozen=True, kw_only=True)
class RoutedSimulation:
    """Times of one iteration of a routed job: `start_s[cell][k]`, `end_s[cell][k]` of `schedule.orders[cell][k]`."""

    schedule: RoutedSchedule
    makespan_s: float
    """End of the last action."""
    period_s: float
    """End of the last stage's synchronisation; with staggered stages, the longest busy time of a stage."""
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
    shape = (costs.job.replicas, costs.stages, costs.micro_batches)
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
    """Convert native times of `schedule`."""
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
    """Return the most activations held at once: F takes 1, I releases `released` (below 0: takes more), W the rest,
    B all."""
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


_ROUNDING = 1e-9


def check_routed(schedule: RoutedSchedule, costs: RoutedCosts) -> None:
    """Return if the schedule can run; else raise ScheduleError for the first fault.

    Checked in this order: each cell runs F and B, or F, I and W, of exactly the micro-batches that the routing gives
    it, each once and in that order; no cell holds more than its cap; no dead cell is used; and the orders do not
    deadlock.
    """
    for cell, order in zip(costs.cells, schedule.orders, strict=True):
        _check_order(cell, order, schedule.routing)
        pipeline = costs.replicas[cell.replica]
        cap, peak = pipeline.max_in_flight[cell.stage], peak_of(order, pipeline.released_at_backward_input[cell.stage])
        if cap is not None and peak > cap + _ROUNDING:
            raise ScheduleError(
                f"cell {cell} holds {peak:g} activations, its cap is {cap:g}: move a backward or a weight gradient "
                "forward, route micro-batches elsewhere, or raise the cap",
                stage=cell.stage,
            )
    simulate_routed(schedule, costs)


def _check_order(cell: Cell, order: Sequence[RoutedAction], routing: Routing) -> None:
    expected = {
        divmod(job, routing.micro_batches) for job, host in enumerate(routing.hosts[cell.stage]) if host == cell.replica
    }
    done: dict[tuple[int, int], list[Kind]] = {}
    for action in order:
        place = (action.replica, action.micro_batch)
        if place not in expected:
            raise ScheduleError(f"cell {cell} runs {action}, which is routed elsewhere", stage=cell.stage)
        done.setdefault(place, []).append(action.kind)
    if missing := sorted(expected - set(done)):
        raise ScheduleError(
            f"cell {cell} does not run replica {missing[0][0]}'s micro-batch {missing[0][1]}, which is routed to it",
            stage=cell.stage,
        )
    whole = [Kind.FORWARD, Kind.BACKWARD]
    split = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
    for (replica, micro_batch), kinds in done.items():
        if kinds not in (whole, split):
            raise ScheduleError(
                f"cell {cell} runs {''.join(map(str, kinds))} of replica {replica}'s micro-batch {micro_batch}: it has "
                "to be F and B, or F, I and W, once each and in this order",
                stage=cell.stage,
            )
