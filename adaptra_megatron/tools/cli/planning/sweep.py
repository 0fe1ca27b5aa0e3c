# SPDX-License-Identifier: Apache-2.0
"""Compute a table over the values of one or two what-if options: the time of each schedule."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Schedule, ScheduleError
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import JobSimulation, Progress, job_bound, simulate_job
from adaptra_megatron.schedule.simulator import check_fits
from adaptra_megatron.tools.cli.planning.cost_inputs import Axis, WhatIf
from adaptra_megatron.tools.cli.planning.inputs import fixed_schedule
from adaptra_megatron.tools.cli.terminal import print_table

STOCK = "stock"
"""Stock's order, with sends that block, as stock's do."""

Timed = Callable[[JobCosts], JobSimulation | None]
"""Function that times a schedule; returns None if Megatron would refuse it."""


@dataclass(frozen=True)
class SweepPoint:
    """Results at one point of the table."""

    values: tuple[float, ...]
    """By axis."""
    makespan_s: dict[str, float | None]
    """By name of the schedule; None if stock cannot run such a pipeline."""
    lower_bound_s: float


@dataclass(frozen=True, repr=False)
class Sweep:
    """Time of each schedule at each value of one axis, or at each pair of values of two axes."""

    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    points: tuple[SweepPoint, ...]
    """Row by row."""
    over_cap: tuple[str, ...]
    """Schedules that hold more activations than some cap allows."""

    def show(self, *, as_json: bool) -> None:
        """Print the table, or one JSON object on one line."""
        if as_json:
            print(json.dumps({"sweep": self.document()}, allow_nan=False))
            return
        (self._print_columns if len(self.axes) > 1 else self._print_rows)()
        for name in self.over_cap:
            print(f"warning: {name} holds more activations than a cap allows: it would not fit")

    def __repr__(self) -> str:
        return f"<sweep over {' and '.join(axis.name for axis in self.axes)}: {len(self.points)} points>"

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        headings, rows = self._columns() if len(self.axes) > 1 else self._rows()
        lines = [("th", headings), *(("td", row) for row in rows)]
        cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def document(self) -> dict[str, Any]:
        """Return the table for JSON."""
        rows, *columns = self.axes
        labels = {axis.name: dict(zip(axis.values, axis.labels, strict=True)) for axis in self.axes}
        points = []
        for point in self.points:
            found: dict[str, Any] = {"value": point.values[0]}
            if columns:
                found["column"] = point.values[1]
            if rows.name == "link":
                found["link"] = labels["link"][point.values[0]]
            points.append({**found, "makespan_s": point.makespan_s, "lower_bound_s": point.lower_bound_s})
        over = {"columns": {"name": columns[0].name, "unit": columns[0].unit}} if columns else {}
        return {"name": rows.name, "unit": rows.unit, **over, "points": points, "over_cap": list(self.over_cap)}

    def _print_rows(self) -> None:
        (axis,) = self.axes
        print("seconds of one iteration")
        print_table(*self._rows())
        if axis.name == "link":
            last = self.names[-2 if "online" in self.names else -1]
            worst = max(zip(axis.labels, self.points, strict=True), key=lambda pair: pair[1].makespan_s[last] or 0.0)
            print(f"  the link that matters most: {worst[0]}")

    def _rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return headings and cells of a table over one axis."""
        (axis,) = self.axes
        rows = [
            (label, *(_shown(point.makespan_s[name]) for name in self.names), _shown(point.lower_bound_s))
            for label, point in zip(axis.labels, self.points, strict=True)
        ]
        return (axis.heading, *self.names, "lower bound"), rows

    def _print_columns(self) -> None:
        print(f"seconds of one iteration, {self.names[0]}; columns: {self.axes[1].heading}")
        print_table(*self._columns())

    def _columns(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return headings and cells of a table over two axes, for one schedule."""
        rows, columns = self.axes
        (name,) = self.names
        width = len(columns.labels)
        table = [
            (label, *(_shown(point.makespan_s[name]) for point in self.points[width * index : width * (index + 1)]))
            for index, label in enumerate(rows.labels)
        ]
        return (rows.heading, *columns.labels), table


def sweep(
    job: JobCosts,
    asked: WhatIf,
    axes: Sequence[Axis],
    *,
    schedule: str | None = None,
    deadline_s: float | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Time `schedule` at each value of `axes`.

    None: stock's, the zero-bubble one, planned ones and online dispatch; over two axes, planned ones only.
    `deadline_s`: for each plan. Raises InputError, CostError or ScheduleError.
    """
    if schedule is None and len(axes) > 1:
        schedule = "planned"
    names = (schedule,) if schedule is not None else _usual_names(job.base)
    pairs = list(itertools.product(*(axis.values for axis in axes)))
    timed: dict[str, Timed] = {}
    points: list[SweepPoint] = []
    over_cap: set[str] = set()
    counts: int | None = None
    for number, values in enumerate(pairs):
        at = asked.applied_to(job, {axis.name: value for axis, value in zip(axes, values, strict=True)})
        if counts != at.base.micro_batches:  # what fixed orders depend on
            counts = at.base.micro_batches
            timed = {name: _timed(name, at.base, deadline_s, optional=schedule is None) for name in names}
        makespan_s: dict[str, float | None] = {}
        for done, (name, run) in enumerate(timed.items()):
            if progress is not None:
                progress("sweep", number * len(timed) + done, len(pairs) * len(timed))
            found = run(at)
            makespan_s[name] = None if found is None else found.makespan_s
            if found is not None and at.base.stages_over_cap(found.peak_in_flight):
                over_cap.add(name)
        points.append(SweepPoint(values, makespan_s, job_bound(at).seconds))
    in_order = tuple(name for name in names if name in over_cap)
    return Sweep(tuple(axes), names, tuple(points), in_order)


def stock_of(costs: Costs) -> tuple[Schedule, bool] | None:
    """Return stock's order, and whether its sends block; None if Megatron would refuse it."""
    try:
        order = stock_order(costs.stages, costs.micro_batches, costs.chunks)
        check_fits(order, costs)
    except ScheduleError:
        return None
    return order, costs.chunks == 1 or costs.stages > 2


def _usual_names(costs: Costs) -> tuple[str, ...]:
    return (STOCK, "zb-h1" if costs.chunks == 1 else "interleaved-split", "planned", "online")


def _timed(name: str, costs: Costs, deadline_s: float | None, *, optional: bool) -> Timed:
    if name == "planned":
        return lambda job: plan_job(job, deadline_s=deadline_s).simulation
    if name == "online":
        return lambda job: simulate_job(None, job)
    if name == STOCK:
        stock = stock_of(costs)
        if stock is None:
            return lambda job: None
        return lambda job: simulate_job(stock[0], job, blocking=stock[1])
    try:
        order = fixed_schedule(name, costs)
        check_fits(order, costs)
    except ScheduleError:
        if not optional:
            raise
        return lambda job: None
    return lambda job: simulate_job(order, job)


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.6g}"
