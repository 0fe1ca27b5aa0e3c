# SPDX-License-Identifier: Apache-2.0
"""Word what `adaptra plan` and `adaptra simulate` print for a job of many replicas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import ranges
from adaptra_megatron.schedule.jobs.job_simulation import JobSimulation, SlowdownCause
from adaptra_megatron.schedule.simulator import Simulation
from adaptra_megatron.tools.cli.planning.comparison import Comparison
from adaptra_megatron.tools.cli.tables import print_table

# What `adaptra plan` and `adaptra simulate` print: JSON for programs, a summary and a table per stage for people.

_HEADINGS = ("stage", "in flight", "cap", "idle")


@dataclass(frozen=True, kw_only=True)
class PlanningOutcome:
    """One schedule under one set of costs."""

    name: str
    costs: Costs
    simulation: Simulation
    lower_bound: LowerBound
    schedule: Schedule | None
    """None for online dispatch, which has no order until it runs."""
    planning_s: float | None = None

    @property
    def gap(self) -> float:
        """Excess over the lower bound: 0.02 is 2%. Below 0 only if a cap is passed."""
        return self.lower_bound.gap_of(self.simulation.makespan_s)

    def document(self) -> dict[str, object]:
        """For JSON."""
        document = main_figures(self.simulation, self.lower_bound)
        if self.planning_s is not None:
            document["planning_s"] = self.planning_s
        if self.schedule is not None:
            document["schedule_csv"] = schedule_to_csv(self.schedule)
        return document

    def print_text(self, comparison: Comparison, *, per_stage: bool) -> None:
        """The figures in words, what they compare with, and a warning if caps are passed; a line per stage if asked."""
        costs, bound = self.costs, self.lower_bound
        print(f"{self.name}: {costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches")
        print(f"  makespan     {self.simulation.makespan_s:.6g} s")
        print(f"  lower bound  {bound.seconds:.6g} s ({bound.kind})")
        print(f"  gap          {self.gap:.2%}")
        if self.planning_s is not None:
            print(f"  planned in   {self.planning_s:.3g} s")
        comparison.print_text()
        if per_stage:
            print_table(_HEADINGS, _stage_rows(self))
        print_cap_warnings(costs, self.simulation.peak_in_flight)


def print_cap_warnings(costs: Costs, peaks: Sequence[float]) -> None:
    """A line if caps are passed."""
    over = costs.stages_over_cap(peaks)
    if not over:
        return
    caps = {costs.max_in_flight[stage] for stage in over}
    cap = f"{caps.pop():g}" if len(caps) == 1 else "lower"
    one = f"stage {over[0]}", "holds", "its"
    what, verb, their = one if len(over) == 1 else (f"stages {ranges(over)}", "hold", "their")
    most = max(peaks[stage] for stage in over)
    print(
        f"warning: {what} {verb} {'up to ' if len(over) > 1 else ''}{most:g} activations, {their} cap is {cap}: this "
        "schedule would not fit; `adaptra plan` finds one that does"
    )


def main_figures(simulation: Simulation | JobSimulation, bound: LowerBound) -> dict[str, object]:
    """First entries of every JSON output. Its keys are an interface: add, never rename."""
    return {
        "makespan_s": simulation.makespan_s,
        "lower_bound_s": bound.seconds,
        "gap": bound.gap_of(simulation.makespan_s),
        "peak_in_flight": list(simulation.peak_in_flight),
    }


def _stage_rows(outcome: PlanningOutcome) -> list[tuple[str, ...]]:
    simulation = outcome.simulation
    return [
        (str(stage), f"{peak:g}", "none" if cap is None else f"{cap:g}", f"{idle:.1%}")
        for stage, (peak, cap, idle) in enumerate(
            zip(simulation.peak_in_flight, outcome.costs.max_in_flight, simulation.bubble_fraction, strict=True)
        )
    ]


_MOST_ROWS = 8
"""Most rows of the table of replicas, slowest first."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """One schedule, or online dispatch, in all replicas of a job."""

    name: str
    simulation: JobSimulation
    lower_bound: LowerBound
    cause: SlowdownCause | None
    """Why the slowest replica is slow."""
    schedule: Schedule | None
    """None for online dispatch."""
    planning_s: float | None = None
    online_makespan_s: float | None = None
    """With `planning_s`: what dispatching online in each replica would take."""

    @property
    def gap(self) -> float:
        """Excess over the lower bound: 0.02 is 2%. Below 0 only if a cap is passed."""
        return self.lower_bound.gap_of(self.simulation.makespan_s)

    def document(self) -> dict[str, object]:
        """For JSON: the keys of a single pipeline, and what is known of the replicas."""
        return _document(self)

    def print_text(self, comparison: Comparison, *, per_stage: bool) -> None:
        """The figures in words, what they compare with, and one line for each of the slowest groups of replicas."""
        _print_text(self, comparison, per_stage)


def _document(outcome: JobOutcome) -> dict[str, object]:
    simulation, job = outcome.simulation, outcome.simulation.job
    fastest_s, median_s, slowest_s = _spread(simulation)
    document = main_figures(simulation, outcome.lower_bound)
    if outcome.planning_s is not None:
        document["planning_s"] = outcome.planning_s
        document["online_makespan_s"] = outcome.online_makespan_s
    document["ranks"] = job.ranks
    document["replicas"] = {
        "count": job.replicas,
        "makespan_s": {"min": fastest_s, "median": median_s, "max": slowest_s},
        "slowest": {
            "replicas": list(job.groups[simulation.slowest].replicas),
            "cause": outcome.cause.what if outcome.cause is not None else None,
            "cause_s": outcome.cause.gain_s if outcome.cause is not None else None,
        },
        "groups": [
            {"replicas": ranges(group.replicas), "makespan_s": seconds}
            for group, seconds in zip(job.groups, simulation.pipelines_s, strict=True)
        ],
    }
    if outcome.schedule is not None:
        document["schedule_csv"] = schedule_to_csv(outcome.schedule)
    return document


def _print_text(outcome: JobOutcome, comparison: Comparison, per_stage: bool) -> None:
    simulation, job, bound = outcome.simulation, outcome.simulation.job, outcome.lower_bound
    costs = job.base
    fastest_s, median_s, slowest_s = _spread(simulation)
    print(
        f"{outcome.name}: {costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches, "
        f"{job.replicas} replicas, {job.ranks} ranks"
    )
    print(f"  makespan     {simulation.makespan_s:.6g} s")
    print(f"  lower bound  {bound.seconds:.6g} s ({bound.kind}, {bound.where})")
    print(f"  gap          {outcome.gap:.2%}")
    print(f"  pipelines    {fastest_s:.6g} s, median {median_s:.6g} s, slowest {slowest_s:.6g} s")
    slowest = job.groups[simulation.slowest]
    why = f"{outcome.cause.what} costs it {outcome.cause.gain_s:.3g} s" if outcome.cause else "no single link or stage"
    print(f"  slowest      {slowest}: {why}")
    if outcome.planning_s is not None:
        print(f"  planned in   {outcome.planning_s:.3g} s")
    if outcome.online_makespan_s is not None:
        print(f"  online       {outcome.online_makespan_s:.6g} s if each replica dispatches for itself")
    comparison.print_text()
    if per_stage:
        caps = ("none" if cap is None else f"{cap:g}" for cap in costs.max_in_flight)
        peaks = (f"{peak:g}" for peak in simulation.peak_in_flight)
        print_table(("stage", "in flight", "cap"), list(zip(map(str, range(costs.stages)), peaks, caps, strict=True)))
    order = sorted(range(len(job.groups)), key=lambda index: -simulation.pipelines_s[index])
    rows = [
        (ranges(job.groups[index].replicas), f"{simulation.pipelines_s[index]:.6g} s") for index in order[:_MOST_ROWS]
    ]
    print_table(("replicas", "makespan"), rows)
    if len(order) > _MOST_ROWS:
        print(f"  and {len(order) - _MOST_ROWS} faster kinds of replica")
    print_cap_warnings(costs, simulation.peak_in_flight)


def _spread(simulation: JobSimulation) -> tuple[float, float, float]:
    """Least, median and most seconds that a replica's pipeline takes, over all replicas."""
    seconds = [
        pipeline_s
        for group, pipeline_s in zip(simulation.job.groups, simulation.pipelines_s, strict=True)
        for _ in group.replicas
    ]
    return min(seconds), statistics.median(seconds), max(seconds)
