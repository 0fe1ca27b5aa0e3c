# SPDX-License-Identifier: Apache-2.0
"""Answer what-if questions from Python and notebooks: the functions behind `adaptra plan`, `simulate` and `analyze`.

Options are those of the command line, with the same spelling of values: `slow_link="3-4:latency=60ms"`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, job_costs_from_json
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import JobSimulation, job_bound, simulate_job
from adaptra_megatron.schedule.simulator import Simulation
from adaptra_megatron.tools.cli.planning.cost_inputs import (
    Change,
    WhatIf,
    link_values,
    read_given,
    slow_link,
    slow_stage,
)
from adaptra_megatron.tools.cli.planning.inputs import InputError, Value, fixed_schedule, placed_for, whole_value
from adaptra_megatron.tools.cli.planning.sweep import STOCK, Sweep, stock_of
from adaptra_megatron.tools.cli.planning.sweep import sweep as sweep_over
from adaptra_megatron.tools.report.timelines import Drawn

if TYPE_CHECKING:
    from adaptra_megatron.tools.replay.analysis import Analysis

Strings = str | Iterable[str]
Count = int | str | None
"""A number or, in a sweep, a range such as "8..20/6"."""
_ROW_PIXELS, _PAGE_PIXELS = 60, 260


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """Time of an iteration in one order of actions. Notebooks show its timeline."""

    name: str
    job: JobCosts
    schedule: Schedule
    """The order of actions; for online dispatch, the resulting order of the slowest replica."""
    makespan_s: float
    lower_bound: LowerBound
    peak_in_flight: tuple[float, ...]
    """Maximum number of activations that each stage holds at once, in any replica."""
    simulation: Simulation
    """Start and end of each action of the slowest replica."""
    costs: Costs
    """Costs of that replica."""

    @property
    def gap(self) -> float:
        """Time above the lower bound, as a share of it: 0.02 is 2%."""
        return self.lower_bound.gap_of(self.makespan_s)

    @property
    def csv(self) -> str:
        """The order in the format of torch.distributed.pipelining."""
        return schedule_to_csv(self.schedule)

    def __repr__(self) -> str:
        costs = self.costs
        many = f", {self.job.replicas} replicas" if self.job.replicas > 1 else ""
        return (
            f"<{self.name}: {self.makespan_s:.6g} s, {self.gap:.2%} above its bound ({self.lower_bound.where}); "
            f"{costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches{many}>"
        )

    def _repr_html_(self) -> str | None:
        """Return a frame with the timeline; None, so that notebooks show text, for a custom placement."""
        from adaptra_megatron.tools.report.report_page import plan_page  # Jinja

        if self.costs.custom_placement is not None:
            return None
        headline = f"{self.makespan_s:.4g} s, {self.gap:.2%} above its bound"
        page = plan_page(self.name, headline, [Drawn(self.name, self.simulation, self.costs)])
        height = _PAGE_PIXELS + _ROW_PIXELS * self.costs.stages
        return f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>'


def read_costs(source: Path | str | dict[str, Any], *, plan: int | None = None) -> JobCosts:
    """Read costs from a dict, or from any input of `adaptra plan`: COSTS.json, a run's directory, its event log, or a
    trace.

    `plan`: number of the run's plan whose costs are read; None: the latest. Raises CostError for invalid costs,
    cli.planning.inputs.InputError for an input that cannot be read.
    """
    return job_costs_from_json(source) if isinstance(source, dict) else read_given(Path(source), plan).job


def plan(costs: JobCosts | Costs, *, deadline_s: float | None = None, **changes: Any) -> Answer:
    """Return the fastest order of actions found within the caps. `changes`: see `what_if`.

    Deterministic. Raises PlanError if nothing fits the caps, InputError or ValueError for invalid changes.
    """
    job = _changed(costs, changes)
    return _answer("planned", plan_job(job, deadline_s=deadline_s).simulation)


def simulate(
    schedule: Schedule | Answer | str, costs: JobCosts | Costs, *, blocking: bool = False, **changes: Any
) -> Answer:
    """Return the time of an iteration in the order `schedule`. `changes`: see `what_if`.

    `schedule`: an order, an answer (its order), a name as in `adaptra simulate --schedule`, "stock" (with blocking
    exchanges), or a CSV file. Raises ScheduleError if it cannot run at these costs, and the errors of `plan`.
    """
    job, name = _changed(costs, changes), schedule if isinstance(schedule, str) else "simulated"
    if isinstance(schedule, Answer):
        name, schedule = schedule.name, schedule.schedule
    if isinstance(schedule, str):
        job = placed_for(None if schedule == STOCK else schedule, job)
        if schedule == "planned":
            return plan(job)
        if schedule == "online":
            return _answer(name, simulate_job(None, job))
        if schedule == STOCK:
            stock = stock_of(job.base)
            if stock is None:
                raise InputError("stock's order does not run with these numbers of stages, chunks and micro-batches")
            schedule, blocking = stock
        else:
            schedule = fixed_schedule(schedule, job.base)
    return _answer(name, simulate_job(schedule, job, blocking=blocking))


def sweep(
    costs: JobCosts | Costs, *, schedule: str | None = None, deadline_s: float | None = None, **changes: Any
) -> Sweep:
    """Return a table over one or two ranges in `changes`, such as `slow_link="3-4:latency=0..100ms/10"`.

    `schedule`: a name; None: stock's order, the zero-bubble order, plans and online dispatch. Notebooks show the
    table; `document()` returns its figures. Raises InputError if there is no range.
    """
    job, asked = _job(costs), what_if(**changes)
    axes = asked.axes(job)
    if not axes:
        raise InputError("a sweep needs a range, such as slow_link='3-4:latency=0..100ms/10', or each_link")
    return sweep_over(job, asked, axes, schedule=schedule, deadline_s=deadline_s)


def analyze(
    path: Path | str,
    *,
    stages: int | None = None,
    replicas: int | None = None,
    activation_gib: float | None = None,
) -> Analysis:
    """Return what is slow in a recorded job, as `adaptra analyze` does; if that is uncertain, its `doubt` says why.
    Needs numpy.

    `stages`, `replicas`: pipeline size and number of pipelines, if the traces lack them. Raises RecordingError if
    there is no recording, ReplayError if no step can be replayed.
    """
    from adaptra_megatron.tools.recordings.reading import read_recording
    from adaptra_megatron.tools.recordings.recorded_places import Asked
    from adaptra_megatron.tools.replay.analysis import analyse

    recording = read_recording(Path(path), asked=Asked(stages=stages, replicas=replicas))
    return analyse(recording, activation_gib=activation_gib)


def what_if(
    *,
    slow_link: Strings = (),
    slow_stage: Strings = (),
    each_link: str | None = None,
    replicas: int | None = None,
    max_in_flight: Count = None,
    micro_batches: Count = None,
) -> WhatIf:
    """Return changes of costs, spelled as the options of `adaptra plan`. `slow_link`, `slow_stage`: one or several.

    Raises ValueError for invalid values.
    """
    changes: list[Change] = [*map(_parse_link, _strings(slow_link)), *map(_parse_stage, _strings(slow_stage))]
    return WhatIf(
        changes=tuple(changes),
        replicas=replicas,
        max_in_flight=_count(max_in_flight),
        micro_batches=_count(micro_batches),
        each_link=None if each_link is None else link_values(each_link),
    )


_parse_link, _parse_stage = slow_link, slow_stage


def _strings(given: Strings) -> Iterable[str]:
    return [given] if isinstance(given, str) else given


def _count(given: Count) -> Value | None:
    return None if given is None else whole_value(str(given))


def _job(costs: JobCosts | Costs) -> JobCosts:
    return JobCosts(costs) if isinstance(costs, Costs) else costs


def _changed(costs: JobCosts | Costs, changes: dict[str, Any]) -> JobCosts:
    job, asked = _job(costs), what_if(**changes)
    if axes := asked.axes(job):
        raise InputError(f"{axes[0].name} is a range: sweep() takes one")
    return asked.applied_to(job)


def _answer(name: str, found: JobSimulation) -> Answer:
    simulation = found.slowest_replica
    return Answer(
        name=name,
        job=found.job,
        schedule=simulation.schedule,
        makespan_s=found.makespan_s,
        lower_bound=job_bound(found.job),
        peak_in_flight=found.peak_in_flight,
        simulation=simulation,
        costs=found.job.groups[found.slowest].costs,
    )
