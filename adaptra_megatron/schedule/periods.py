# SPDX-License-Identifier: Apache-2.0
"""Compute the period of iterations without a barrier between them: each stage begins the next one when its own is over.

The time from one iteration to the next is then shorter than a makespan: idle time of the first stages at the end of one
iteration, and of the last stages at the beginning of the next, costs nothing (ReCycle: staggered optimizer; Zero
Bubble: ZB-H2).
"""

from __future__ import annotations

import dataclasses
import math

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.classic import zb_h2
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import Plan, plan
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate, simulate_online

_SETTLED, _MEASURED = 4, 2
"""Numbers of iterations simulated before the measured ones, and of measured ones."""


def period_s(schedule: Schedule, costs: Costs) -> float:
    """Return the seconds from one iteration of `schedule` to the next, without a barrier between iterations.

    Optimizer steps take no time. Raises SimulationError as `simulate`.
    """
    begun_s, ended_s = (
        simulate(repeated(schedule, times), dataclasses.replace(costs, micro_batches=times * costs.micro_batches))
        for times in (_SETTLED, _SETTLED + _MEASURED)
    )
    return (ended_s.makespan_s - begun_s.makespan_s) / _MEASURED


def repeated(schedule: Schedule, times: int) -> Schedule:
    """Return the schedule of `times` iterations as one: each stage repeats its order for new micro-batches."""
    return dataclasses.replace(
        schedule,
        orders=tuple(
            tuple(
                action._replace(micro_batch=action.micro_batch + number * schedule.micro_batches)
                for number in range(times)
                for action in order
            )
            for order in schedule.orders
        ),
        micro_batches=times * schedule.micro_batches,
    )


def plan_for_period(
    costs: Costs, *, deadline_s: float | None = None, patience_s: float | None = None, split: bool = True
) -> Plan:
    """Return the schedule with the shortest period: from `plan`, from online dispatch, or ZB-H2 if the caps permit it.

    Among equally fast schedules, returns the one that holds the fewest activations. In the result, `makespan_s` is the
    period, and the bound is a bound on periods. Arguments and errors are those of `plan`.
    """
    best = plan(costs, deadline_s=deadline_s, patience_s=patience_s, split=split)
    known = [best.schedule]
    if split and not costs.shared_queue:
        known.append(simulate_online(costs).schedule)
        if costs.chunks == 1:
            known.append(zb_h2(costs.stages, costs.micro_batches))
    peaks = [peak_in_flight(schedule, costs.released_at_backward_input) for schedule in known]
    periods_s = [
        math.inf if costs.stages_over_cap(held) else period_s(schedule, costs)
        for schedule, held in zip(known, peaks, strict=True)
    ]
    chosen = min(range(len(known)), key=lambda number: (periods_s[number], sum(peaks[number])))
    return dataclasses.replace(
        best,
        schedule=known[chosen],
        makespan_s=periods_s[chosen],
        lower_bound=period_bound(costs),
        peak_in_flight=tuple(peaks[chosen]),
    )


def period_bound(costs: Costs) -> LowerBound:
    """Return the computation of the busiest stage in an iteration, a lower bound of any period."""
    work_s = [
        costs.micro_batches
        * math.fsum(
            forward + min(backward, split_i + split_w)
            for forward, backward, split_i, split_w in zip(*tables, strict=True)
        )
        for tables in zip(
            costs.forward_s, costs.whole_backward_s, costs.backward_input_s, costs.backward_weight_s, strict=True
        )
    ]
    slowest = max(range(costs.stages), key=work_s.__getitem__)
    return LowerBound(seconds=work_s[slowest], kind="stage", where=f"stage {slowest}")
