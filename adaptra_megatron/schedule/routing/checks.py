# SPDX-License-Identifier: Apache-2.0
"""Checks that a routed schedule can run: complete, in order, within the caps, free of deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.errors import ScheduleError
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.plans import RoutedAction, RoutedSchedule, Routing
from adaptra_megatron.schedule.routing.simulator import peak_of, simulate_routed

_ROUNDING = 1e-9


def check_routed(schedule: RoutedSchedule, costs: RoutedCosts) -> None:
    """Return if the schedule can run; else raise ScheduleError for the first thing wrong.

    Checked in this order: each cell runs F and B, or F, I and W, of exactly the micro-batches that the routing gives
    it, each once and in that order; no cell holds more than its cap; no dead cell is used, and the orders do not wait
    on each other for ever.
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
