# SPDX-License-Identifier: Apache-2.0
"""A table over the values of one what-if option: what each schedule would take."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptra_megatron.cli.planning.inputs import fixed_schedule
from adaptra_megatron.cli.planning.what_if import Change, Swept, changed_job
from adaptra_megatron.cli.tables import print_table
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.errors import ScheduleError
from adaptra_megatron.schedule.jobs.costs import JobCosts
from adaptra_megatron.schedule.jobs.planner import plan_job
from adaptra_megatron.schedule.jobs.simulation import (
    JobSimulation,
    Progress,
    job_bound,
    simulate_job,
    simulate_job_online,
)
from adaptra_megatron.schedule.simulator import check_fits

STOCK = "stock"
"""Stock's order, with stock's sends that block."""

Timed = Callable[[JobCosts], JobSimulation | None]
"""Function that times a schedule; returns None where Megatron would refuse it."""


@dataclass(frozen=True)
class Sweep:
    """Time of each schedule at each value."""

    swept: Swept
    names: tuple[str, ...]
    values: list[float]
    makespan_s: dict[str, list[float | None]]
    """By name of the schedule; None where stock cannot run such a pipeline."""
    lower_bound_s: list[float]
    over_cap: tuple[str, ...]
    """Schedules that hold more activations than some cap allows."""

    def show(self, *, as_json: bool) -> None:
        """Print it: one JSON object on one line, or a table."""
        (self._print_json if as_json else self._print_text)()

    def _print_json(self) -> None:
        points = [
            {
                "value": value,
                "makespan_s": {name: self.makespan_s[name][index] for name in self.names},
                "lower_bound_s": self.lower_bound_s[index],
            }
            for index, value in enumerate(self.values)
        ]
        sweep = {"name": self.swept.name, "unit": self.swept.unit, "points": points, "over_cap": list(self.over_cap)}
        print(json.dumps({"sweep": sweep}, allow_nan=False))

    def _print_text(self) -> None:
        unit = f" ({self.swept.unit})" if self.swept.unit else ""
        rows = []
        for index, value in enumerate(self.values):
            cells = (self.makespan_s[name][index] for name in self.names)
            known = ("-" if seconds is None else f"{seconds:.6g}" for seconds in cells)
            rows.append((f"{value:.6g}", *known, f"{self.lower_bound_s[index]:.6g}"))
        print("seconds of one iteration")
        print_table((f"{self.swept.name}{unit}", *self.names, "lower bound"), rows)
        for name in self.over_cap:
            print(f"warning: {name} holds more activations than a cap allows: it would not fit")


def sweep(
    job: JobCosts,
    changes: Sequence[Change],
    swept: Swept,
    *,
    replicas: int | None,
    schedule: str | None = None,
    deadline_s: float | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Time `schedule` (None: stock's, the zero-bubble one, planned ones, online dispatch) at each value of `swept`.

    `deadline_s` is that of each plan. Raises InputError, CostError or ScheduleError.
    """
    timed = _timed_schedules(job.base, schedule, deadline_s)
    values = swept.range.values
    makespan_s: dict[str, list[float | None]] = {name: [] for name in timed}
    bounds_s: list[float] = []
    over_cap: set[str] = set()
    for number, value in enumerate(values):
        at = changed_job(job, changes, replicas=replicas, at=value)
        for done, (name, run) in enumerate(timed.items()):
            if progress is not None:
                progress("sweep", number * len(timed) + done, len(values) * len(timed))
            found = run(at)
            makespan_s[name].append(None if found is None else found.makespan_s)
            if found is not None and at.base.stages_over_cap(found.peak_in_flight):
                over_cap.add(name)
        bounds_s.append(job_bound(at).seconds)
    in_order = tuple(name for name in timed if name in over_cap)
    return Sweep(swept, tuple(timed), values, makespan_s, bounds_s, in_order)


def _timed_schedules(costs: Costs, chosen: str | None, deadline_s: float | None) -> dict[str, Timed]:
    """Schedules to time, by name. Fixed orders are made once: they do not depend on the value."""
    if chosen is None:
        zero_bubble = "zb-h1" if costs.chunks == 1 else "interleaved-split"
        names: tuple[str, ...] = (STOCK, zero_bubble, "planned", "online")
    else:
        names = (chosen,)
    return {name: _timed(name, costs, deadline_s, optional=chosen is None) for name in names}


def _timed(name: str, costs: Costs, deadline_s: float | None, *, optional: bool) -> Timed:
    if name == "planned":
        return lambda job: plan_job(job, deadline_s=deadline_s).simulation
    if name == "online":
        return simulate_job_online
    try:
        if name == STOCK:
            order = stock_order(costs.stages, costs.micro_batches, costs.chunks)
            blocking = costs.chunks == 1 or costs.stages > 2
        else:
            order, blocking = fixed_schedule(name, costs), False
        check_fits(order, costs)
    except ScheduleError:
        if not optional:
            raise
        return lambda job: None
    return lambda job: simulate_job(order, job, blocking=blocking)
