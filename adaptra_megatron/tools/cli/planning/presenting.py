# SPDX-License-Identifier: Apache-2.0
"""Show results of `plan` and `simulate` as tables, JSON and pictures: a page, a trace for Perfetto, text."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.jobs.job_costs import ranges
from adaptra_megatron.schedule.jobs.job_simulation import JobSimulation, SlowdownCause
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.tools.cli.planning.cells import add_cell_options, stage_picture
from adaptra_megatron.tools.cli.planning.comparison import Comparison
from adaptra_megatron.tools.cli.planning.cost_inputs import PlanInput, add_what_if_options
from adaptra_megatron.tools.cli.planning.inputs import InputError, count
from adaptra_megatron.tools.cli.terminal import add_progress_option, print_table
from adaptra_megatron.tools.report.perfetto import chrome_trace, write_trace
from adaptra_megatron.tools.report.timelines import Drawn, simulated_traces


def add_drawing_options(parser: argparse.ArgumentParser) -> None:
    """Add `--html`, `--trace` and `--timeline`."""
    group = parser.add_argument_group("pictures", "for one set of costs; of several replicas, the slowest is drawn")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines that needs no other file")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev (.gz compresses; .pftrace: its format)",
    )
    group.add_argument("--timeline", action="store_true", help="draw the plan as text, a letter per action")


def asks_for_drawings(options: argparse.Namespace) -> bool:
    """Return whether any picture is requested."""
    return options.html is not None or options.trace is not None or options.timeline


def draw(comparison: Comparison, name: str, options: argparse.Namespace) -> None:
    """Write and print the requested pictures. Raises InputError if one cannot be written."""
    if not asks_for_drawings(options):
        return
    if (options.html or options.trace) and comparison.job.base.custom_placement is not None:
        raise InputError("--html and --trace draw Megatron's placement alone: --timeline draws others, too")
    drawn = _drawn(comparison)
    if options.html is not None:
        from adaptra_megatron.tools.report.report_page import plan_page  # Jinja, which little else needs

        planned, healthy = comparison["planned"].makespan_s, comparison.healthy_s
        headline = f"{planned:.4g} s planned, {healthy:.4g} s healthy"
        page = plan_page(name, headline, drawn, rows=comparison.cells, note=comparison.note)
        _write(options.html, lambda path: path.write_text(page, encoding="utf-8"))
    if options.trace is not None:
        documents = [
            chrome_trace(simulated_traces(each.simulation), label=each.title, run=run) for run, each in enumerate(drawn)
        ]
        _write(options.trace, lambda path: write_trace(path, *documents))
    if options.timeline and not options.json:
        axis_s = max(each.simulation.makespan_s for each in drawn)
        for each in drawn:
            print(f"{each.title}, {each.simulation.makespan_s:.4g} s")
            print("\n".join(stage_picture(each.simulation, axis_s)))


def _drawn(comparison: Comparison) -> list[Drawn]:
    """Return the rows with a known order, each in its slowest replica."""
    found = []
    for row in comparison.rows:
        job = row.simulation
        if job is not None and job.schedule is not None and row.name != "healthy":
            found.append(Drawn(row.name, job.slowest_replica, job.job.groups[job.slowest].costs))
    return found


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    except TraceError as error:
        raise InputError(str(error)) from error


def print_cap_warnings(costs: Costs, peaks: Sequence[float]) -> None:
    """Print a warning if caps are exceeded."""
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


def main_figures(simulation: JobSimulation, bound: LowerBound) -> dict[str, object]:
    """Return the first entries of every JSON output. Keys are an interface: add, never rename."""
    return {
        "makespan_s": simulation.makespan_s,
        "lower_bound_s": bound.seconds,
        "gap": bound.gap_of(simulation.makespan_s),
        "peak_in_flight": list(simulation.peak_in_flight),
    }


_MOST_ROWS = 8
"""Maximum number of rows of the table of replicas, slowest first."""


@dataclass(frozen=True, kw_only=True)
class PlanningOutcome:
    """One schedule, or online dispatch, in all replicas of a job (one or more)."""

    name: str
    simulation: JobSimulation
    lower_bound: LowerBound
    cause: SlowdownCause | None = None
    """Why the slowest replica is slow."""
    planning_s: float | None = None
    online_makespan_s: float | None = None
    """With `planning_s`: seconds with online dispatch in each replica."""

    @property
    def gap(self) -> float:
        """Time above the lower bound, as a share of it: 0.02 is 2%. Below 0 only if a cap is exceeded."""
        return self.lower_bound.gap_of(self.simulation.makespan_s)

    def document(self) -> dict[str, object]:
        """Return the outcome for JSON, with the replicas if there are several."""
        document = main_figures(self.simulation, self.lower_bound)
        one = self.simulation.job.is_one_pipeline
        if self.planning_s is not None:
            document["planning_s"] = self.planning_s
            if not one:
                document["online_makespan_s"] = self.online_makespan_s
        if not one:
            document |= _replicas_document(self)
        if self.simulation.schedule is not None:
            document["schedule_csv"] = schedule_to_csv(self.simulation.schedule)
        return document

    def print_text(self, comparison: Comparison, *, per_stage: bool) -> None:
        """Print the figures, the comparison, and a warning if caps are exceeded. `per_stage`: also a line per stage.
        Several replicas: also a line for each of the slowest groups."""
        costs, bound, job = self.simulation.job.base, self.lower_bound, self.simulation.job
        one = job.is_one_pipeline
        print(
            f"{self.name}: {costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches"
            + ("" if one else f", {job.replicas} replicas, {job.ranks} ranks")
        )
        print(f"  makespan     {self.simulation.makespan_s:.6g} s")
        print(f"  lower bound  {bound.seconds:.6g} s ({bound.kind}{'' if one else f', {bound.where}'})")
        print(f"  gap          {self.gap:.2%}")
        if not one:
            _print_slowest(self)
        if self.planning_s is not None:
            print(f"  planned in   {self.planning_s:.3g} s")
        if self.online_makespan_s is not None:
            print(f"  online       {self.online_makespan_s:.6g} s if each replica dispatches for itself")
        comparison.print_text()
        if per_stage:
            _print_stages(self.simulation)
        if not one:
            _print_replicas(self.simulation)
        print_cap_warnings(costs, self.simulation.peak_in_flight)


def _print_stages(simulation: JobSimulation) -> None:
    costs = simulation.job.base
    headings = ["stage", "in flight", "cap"]
    columns = [
        [str(stage) for stage in range(costs.stages)],
        [f"{peak:g}" for peak in simulation.peak_in_flight],
        ["none" if cap is None else f"{cap:g}" for cap in costs.max_in_flight],
    ]
    if simulation.job.is_one_pipeline:
        headings.append("idle")
        columns.append([f"{idle:.1%}" for idle in simulation.slowest_replica.bubble_fraction])
    print_table(headings, list(zip(*columns, strict=True)))


def _print_slowest(outcome: PlanningOutcome) -> None:
    simulation, cause = outcome.simulation, outcome.cause
    fastest_s, median_s, slowest_s = _spread(simulation)
    print(f"  pipelines    {fastest_s:.6g} s, median {median_s:.6g} s, slowest {slowest_s:.6g} s")
    why = f"{cause.what} costs it {cause.gain_s:.3g} s" if cause is not None else "no single link or stage"
    print(f"  slowest      {simulation.job.groups[simulation.slowest]}: {why}")


def _print_replicas(simulation: JobSimulation) -> None:
    job = simulation.job
    order = sorted(range(len(job.groups)), key=lambda index: -simulation.pipelines_s[index])
    rows = [
        (ranges(job.groups[index].replicas), f"{simulation.pipelines_s[index]:.6g} s") for index in order[:_MOST_ROWS]
    ]
    print_table(("replicas", "makespan"), rows)
    if len(order) > _MOST_ROWS:
        print(f"  and {len(order) - _MOST_ROWS} faster kinds of replica")


def _replicas_document(outcome: PlanningOutcome) -> dict[str, object]:
    simulation, job, cause = outcome.simulation, outcome.simulation.job, outcome.cause
    fastest_s, median_s, slowest_s = _spread(simulation)
    replicas = {
        "count": job.replicas,
        "makespan_s": {"min": fastest_s, "median": median_s, "max": slowest_s},
        "slowest": {
            "replicas": list(job.groups[simulation.slowest].replicas),
            "cause": cause.what if cause is not None else None,
            "cause_s": cause.gain_s if cause is not None else None,
        },
        "groups": [
            {"replicas": ranges(group.replicas), "makespan_s": seconds}
            for group, seconds in zip(job.groups, simulation.pipelines_s, strict=True)
        ],
    }
    return {"ranks": job.ranks, "replicas": replicas}


def _spread(simulation: JobSimulation) -> tuple[float, float, float]:
    """Return the least, the median and the most seconds of a replica's pipeline, over all replicas."""
    seconds = [
        pipeline_s
        for group, pipeline_s in zip(simulation.job.groups, simulation.pipelines_s, strict=True)
        for _ in group.replicas
    ]
    return min(seconds), statistics.median(seconds), max(seconds)


WHERE_COSTS_ARE = """\
COSTS is a JSON file (docs/costs.md; - is stdin), the directory that a run was given by --adaptra-trace-dir (the costs
of its latest plan, or of --plan N), one of its events-*.jsonl, or a trace as for `adaptra analyze`.
"""


class PresentedAnswer(Protocol):
    """Answer to a question."""

    def document(self) -> dict[str, Any]:
        """Return the document for JSON."""

    def print_text(self) -> None:
        """Print the answer as text."""


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the costs, and all options that both commands have."""
    parser.add_argument("costs", type=Path, metavar="COSTS", help="file of costs, run, event log or trace")
    parser.add_argument(
        "--plan", type=int, metavar="N", help="plan of a run whose costs are used (default: the latest)"
    )
    parser.add_argument(
        "--pipeline-size",
        type=count,
        metavar="COUNT",
        help="number of stages, if a trace of many ranks lacks it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, also for errors")
    parser.add_argument("--stages", action="store_true", help="also print a line for each stage")
    add_progress_option(parser)
    add_what_if_options(parser)
    add_drawing_options(parser)
    add_cell_options(parser)


def present(
    outcome: PlanningOutcome,
    comparison: Comparison,
    given: PlanInput,
    options: argparse.Namespace,
    answers: Sequence[PresentedAnswer] = (),
) -> None:
    """Print the outcome with its comparison and the answers, and draw the requested pictures. Raises InputError as
    `draw`."""
    if options.json:
        document = {**outcome.document(), "comparison": comparison.document()}
        for answer in answers:
            document |= answer.document()
        draw(comparison, given.name, options)
        print(json.dumps(document, allow_nan=False))
        return
    outcome.print_text(comparison, per_stage=options.stages)
    for answer in answers:
        answer.print_text()
    draw(comparison, given.name, options)
