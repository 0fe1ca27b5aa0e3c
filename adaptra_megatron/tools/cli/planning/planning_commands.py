# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra plan`: the best schedule for given costs, when a loss is reached, and what memory or a new host
saves; and `adaptra simulate`: the time of a schedule under given costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import Progress, find_cause, job_bound, simulate_job
from adaptra_megatron.schedule.more_memory import Bought, more_memory
from adaptra_megatron.tools.cli.planning.cells import asks_for_routing, routed_outcome
from adaptra_megatron.tools.cli.planning.comparison import Comparison, compare, healthy_form, row_of
from adaptra_megatron.tools.cli.planning.cost_inputs import Axis, PlanInput, WhatIf, read_given, what_if
from adaptra_megatron.tools.cli.planning.inputs import (
    SCHEDULE_NAMES,
    InputError,
    argument_type,
    duration_s,
    fixed_schedule,
    parsed_value,
    placed_for,
    read_text,
    seconds,
    share,
)
from adaptra_megatron.tools.cli.planning.presenting import (
    WHERE_COSTS_ARE,
    PlanningOutcome,
    PresentedAnswer,
    add_shared_options,
    asks_for_drawings,
    present,
)
from adaptra_megatron.tools.cli.planning.sweep import STOCK, stock_of, sweep
from adaptra_megatron.tools.cli.terminal import no_cycle_collection, print_table, shown_progress

_SEGMENTS = 8
"""Parts of a range that are sampled, before the one that reaches the loss is bisected."""
_HALVINGS = 7
_LEAST_WORTH = 0.005
"""Smaller gains by memory are left out."""
_GIB = {"": 1.0, "GiB": 1.0, "MiB": 2.0**-10}


def add_question_options(parser: argparse.ArgumentParser) -> None:
    """Add `--lose`, `--win-back`, `--activation-gib` and `--exchange`."""
    group = parser.add_argument_group("questions", "about the what-if options or the costs")
    group.add_argument(
        "--lose",
        type=argument_type(share),
        metavar="SHARE",
        help="first value of the range at which an iteration takes this much longer, such as 5%%",
    )
    group.add_argument(
        "--win-back", action="store_true", help="how much of the loss more activations per stage would win back"
    )
    group.add_argument(
        "--activation-gib",
        type=argument_type(_gib),
        metavar="GIB",
        help="memory of one micro-batch's activations on a stage: --win-back then says how much it takes",
    )
    group.add_argument(
        "--exchange",
        type=argument_type(duration_s),
        metavar="DOWNTIME",
        help="when a repaired job has made up for this much downtime, such as 20min",
    )


class LostTime:
    """First value of a range at which an iteration takes a share longer than a healthy one in the same order."""

    def __init__(self, given: PlanInput, asked: WhatIf, lose: float, deadline_s: float | None) -> None:
        """Search the range. Raises InputError unless exactly one option is a range of numbers."""
        axes = asked.axes(given.job)
        if len(axes) != 1 or axes[0].range is None:
            raise InputError("--lose needs one range to look in, such as --slow-link 3-4:latency=0..200ms")
        self._axis: Axis = axes[0]
        self._given, self._asked = given, asked
        healthy, _ = healthy_form(given, asked) if asked.micro_batches is None else (given.job, "")
        order = plan_job(healthy, deadline_s=deadline_s).schedule
        self._timed: dict[str, Callable[[JobCosts], float]] = {
            "now": lambda job: simulate_job(order, job).makespan_s,
            "planned": lambda job: plan_job(job, deadline_s=deadline_s).simulation.makespan_s,
        }
        if (stock := stock_of(healthy.base)) is not None:
            self._timed = {
                STOCK: lambda job: simulate_job(stock[0], job, blocking=stock[1]).makespan_s,
                **self._timed,
            }
        self.lose = lose
        self.found = {name: self._first(run, (1.0 + lose) * run(healthy)) for name, run in self._timed.items()}
        """By order: the value; None if the range does not reach it."""

    def document(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {"lose": {"share": self.lose, "name": self._axis.name, "unit": self._axis.unit, "from": self.found}}

    def print_text(self) -> None:
        found = self._axis.range
        assert found is not None
        print(f"an iteration takes {100 * self.lose:g}% longer than a healthy one in the same order from this value on")
        rows = [
            (
                name,
                f"not up to {found.shown(found.last)} {found.unit}"
                if value is None
                else f"{value / found.scale:.4g} {found.unit}",
            )
            for name, value in self.found.items()
        ]
        print_table(("order", self._axis.name), rows)

    def _first(self, run: Callable[[JobCosts], float], limit_s: float) -> float | None:
        """Return the value nearest to the harmless end of the range at which `run` takes more than `limit_s`."""
        wide = self._axis.range
        assert wide is not None

        def hurts(place: float) -> bool:
            at = {self._axis.name: wide.at(1.0 - place if backwards else place)}
            return run(self._asked.applied_to(self._given.job, at)) > limit_s

        first_s, last_s = (
            run(self._asked.applied_to(self._given.job, {self._axis.name: value})) for value in (wide.first, wide.last)
        )
        backwards = first_s > last_s
        hurt = next((step for step in range(_SEGMENTS + 1) if hurts(step / _SEGMENTS)), None)
        if hurt is None:
            return None
        fine, bad = max(0.0, (hurt - 1) / _SEGMENTS), hurt / _SEGMENTS
        for _ in range(_HALVINGS if bad > 0.0 else 0):
            middle = 0.5 * (fine + bad)
            fine, bad = (fine, middle) if hurts(middle) else (middle, bad)
        return wide.at(1.0 - bad if backwards else bad)


class WonBack:
    """Gain by more activations per stage."""

    def __init__(self, comparison: Comparison, activation_gib: float | None, deadline_s: float | None) -> None:
        self._comparison, self._gib = comparison, activation_gib
        job = comparison.job

        def planned_s(costs: Costs) -> float:
            return plan_job(replace(job, base=costs), deadline_s=deadline_s).simulation.makespan_s

        self.bought = more_memory(job.base, planned_s, least_gain=_LEAST_WORTH)

    def document(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "win_back": [
                {
                    "max_in_flight": each.max_in_flight,
                    "makespan_s": each.makespan_s,
                    "won_back": self._share(each),
                    "gib": self._extra_gib(each),
                }
                for each in self.bought
            ]
        }

    def print_text(self) -> None:
        if not self.bought:
            print("more activations per stage win nothing back")
            return
        rows = [
            (
                f"{each.max_in_flight}",
                f"{each.makespan_s:.4g} s",
                f"{each.makespan_s / self._comparison.healthy_s:.1%}",
                "" if (share := self._share(each)) is None else f"{share:.0%}",
                "" if (gib := self._extra_gib(each)) is None else f"{gib:.3g} GiB",
            )
            for each in self.bought
        ]
        print_table(("--max-in-flight", "iteration", "of healthy", "won back", "more per stage"), rows)

    def _share(self, bought: Bought) -> float | None:
        """Return the share of the loss (with the present memory) that is won back."""
        planned_s = self._comparison["planned"].makespan_s
        assert planned_s is not None
        lost_s = planned_s - self._comparison.healthy_s
        return None if lost_s <= 1e-9 * planned_s else (planned_s - bought.makespan_s) / lost_s

    def _extra_gib(self, bought: Bought) -> float | None:
        caps = [cap for cap in self._comparison.job.base.max_in_flight if cap is not None]
        return None if self._gib is None else self._gib * (bought.max_in_flight - min(caps))


class Exchange:
    """Time after which it pays to stop the job and make it healthy."""

    def __init__(self, comparison: Comparison, downtime_s: float) -> None:
        planned_s = comparison["planned"].makespan_s
        assert planned_s is not None
        self.downtime_s = downtime_s
        self.gain_s = planned_s - comparison.healthy_s
        """Seconds per iteration."""
        self.iterations = downtime_s / self.gain_s if self.gain_s > 1e-6 * planned_s else None
        """Iterations until a healthy job is ahead; None if it never is."""
        self.after_s = None if self.iterations is None else self.iterations * planned_s
        """Seconds from the beginning of the downtime."""

    def document(self) -> dict[str, Any]:
        """Return the result for JSON."""
        found = {"downtime_s": self.downtime_s, "gain_s": self.gain_s, "iterations": self.iterations}
        return {"exchange": {**found, "pays_after_s": self.after_s}}

    def print_text(self) -> None:
        if self.iterations is None or self.after_s is None:
            print("a repair saves nothing: the plan takes as long as a healthy job")
            return
        print(
            f"a repair saves {self.gain_s:.3g} s per iteration: a downtime of {_time(self.downtime_s)} is made "
            f"up for after {self.iterations:.0f} iterations, {_time(self.after_s)} after its beginning"
        )


def _gib(text: str) -> float:
    value = parsed_value(text, _GIB)
    if not isinstance(value, float) or value <= 0.0:
        raise ValueError("is no number of GiB above 0")
    return value


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest schedule within the memory cap, and compare it with a healthy job",
        description="Find the fastest schedule within the memory cap; with replicas, one for all of them. Compare its\n"
        "time with a healthy job, stock's order and the order that a healthy job would run.\n\n" + WHERE_COSTS_ARE,
    )
    parser.add_argument("--deadline-s", type=seconds, metavar="SECONDS", help="approximate planning time")
    _add_csv(parser)
    add_shared_options(parser)
    add_question_options(parser)
    parser.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> None:
    given, asked = read_given(options.costs, options.plan, options.pipeline_size), what_if(options)
    axes = asked.axes(given.job)
    _refuse_what_a_table_cannot_do(options, axes)
    deadline_s = options.deadline_s
    with no_cycle_collection():
        with shown_progress(options.progress) as progress:
            if options.lose is not None:
                loss = LostTime(given, asked, options.lose, deadline_s)
            elif axes:
                table = sweep(given.job, asked, axes, deadline_s=deadline_s, progress=progress)
            elif asks_for_routing(options):
                routed = routed_outcome(asked.applied_to(given.job), options, deadline_s=deadline_s)
            else:
                job = asked.applied_to(given.job)
                outcome = _plan(job, deadline_s, progress)
                planned = outcome.simulation
                comparison = compare(given, asked, planned=planned, deadline_s=deadline_s, progress=progress)
                answers: list[PresentedAnswer] = []
                if options.win_back:
                    answers.append(WonBack(comparison, options.activation_gib, deadline_s))
                if options.exchange is not None:
                    answers.append(Exchange(comparison, options.exchange))
                if options.csv is not None:
                    _write(options.csv, planned.schedule)
        if options.lose is not None:
            print(json.dumps(loss.document(), allow_nan=False)) if options.json else loss.print_text()
        elif axes:
            table.show(as_json=options.json)
        elif asks_for_routing(options):
            routed.show(as_json=options.json)
        else:
            present(outcome, comparison, given, options, answers)


def _refuse_what_a_table_cannot_do(options: argparse.Namespace, axes: Sequence[Axis]) -> None:
    single = [name for name in ("csv", "html", "trace", "exchange") if getattr(options, name) is not None]
    single += [name for name in ("timeline", "win_back") if getattr(options, name)]
    routed = asks_for_routing(options)
    if (axes or options.lose is not None) and single:
        name = single[0].replace("_", "-")
        raise InputError(f"--{name} is for one plan: leave it out, or give a value instead of the range")
    if routed and (axes or single or options.lose is not None):
        raise InputError(
            "--slow-cell and --dead make one routed plan: leave out --csv, pictures, questions, and ranges"
        )


def _plan(job: JobCosts, deadline_s: float | None, progress: Progress | None) -> PlanningOutcome:
    start = time.perf_counter()
    found = plan_job(job, deadline_s=deadline_s, progress=progress)
    outcome = PlanningOutcome(
        name="planned",
        simulation=found.simulation,
        lower_bound=found.lower_bound,
        planning_s=time.perf_counter() - start,
    )
    if job.is_one_pipeline:
        return outcome
    return replace(
        outcome,
        cause=find_cause(found.simulation),
        online_makespan_s=simulate_job(None, job, progress=progress).makespan_s,
    )


def _add_csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--csv", type=Path, metavar="FILE.csv", help="also write the schedule to this file, for --adaptra-plan-csv"
    )


def _write(path: Path, schedule: Schedule | None) -> None:
    assert schedule is not None
    try:
        path.write_text(schedule_to_csv(schedule), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def add_simulate_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "simulate",
        help="compare the time of a schedule with a healthy job, stock's order and a plan",
        description="Time a schedule, in all replicas if there are several; classic ones may exceed the memory cap.\n\n"
        + WHERE_COSTS_ARE,
    )
    parser.add_argument(
        "--schedule",
        metavar="SCHEDULE",
        help=f"{', '.join(SCHEDULE_NAMES)}, or a CSV file in torch.distributed.pipelining's format; "
        "may be omitted if a what-if option has a range, and with --slow-cell and --dead",
    )
    parser.add_argument(
        "--blocking",
        action="store_true",
        help="time sends and receives as stock Megatron-core makes them: blocking (1f1b and interleaved only)",
    )
    _add_csv(parser)
    add_shared_options(parser)
    parser.set_defaults(run=_run_simulate)


def _run_simulate(options: argparse.Namespace) -> None:
    given, asked = read_given(options.costs, options.plan, options.pipeline_size), what_if(options)
    given = replace(given, job=placed_for(options.schedule, given.job))
    if not given.job.base.can_combine:
        _note_overlaps(options.schedule)
    axes, routed = asked.axes(given.job), asks_for_routing(options)
    _refuse_contradictions(options, axes)
    with no_cycle_collection():
        with shown_progress(options.progress) as progress:
            if axes:
                table = sweep(given.job, asked, axes, schedule=options.schedule, progress=progress)
            elif routed:
                alternative = routed_outcome(asked.applied_to(given.job), options, schedule=options.schedule)
            else:
                job = asked.applied_to(given.job)
                outcome = _simulate(job, options.schedule, options.blocking, progress)
                row = row_of(outcome.name, outcome.simulation, outcome.lower_bound)
                comparison = compare(given, asked, timed=row, progress=progress)
                if options.csv is not None:
                    _write(options.csv, outcome.simulation.schedule)
        if axes:
            table.show(as_json=options.json)
        elif routed:
            alternative.show(as_json=options.json)
        else:
            present(outcome, comparison, given, options)


def _note_overlaps(schedule: str | None) -> None:
    """Print on stderr that, for want of costs, overlapped actions of a CSV file are timed one after the other."""
    if schedule is not None and Path(schedule).is_file() and ")OVERLAP_" in read_text(Path(schedule)):
        print(
            f"note: {schedule} overlaps actions; without combined_saving in the costs they run one after the other",
            file=sys.stderr,
        )


def _refuse_contradictions(options: argparse.Namespace, axes: Sequence[Axis]) -> None:
    routed = asks_for_routing(options)
    if options.csv is not None and (axes or routed or options.schedule == "online"):
        raise InputError("--csv is for one order: leave out ranges, --slow-cell, --dead and online")
    if routed and (axes or options.blocking or asks_for_drawings(options) or options.schedule in ("planned", "online")):
        raise InputError(
            "--slow-cell and --dead are timed with a fixed schedule: leave out --blocking (stock's order, the "
            "default, blocks), ranges, pictures, planned and online"
        )
    if options.schedule is None and not axes and not routed:
        raise InputError(f"the following arguments are required: --schedule, one of {', '.join(SCHEDULE_NAMES)}")
    if options.blocking and (axes or options.schedule == "online"):
        raise InputError(
            "--blocking is for one schedule and no range: the table's stock column blocks anyway"
            if axes
            else "--blocking needs a fixed order, online dispatch has none"
        )
    if axes and asks_for_drawings(options):
        raise InputError("--html, --trace and --timeline are for one schedule: give a value instead of the range")


def _simulate(job: JobCosts, name: str, blocking: bool, progress: Progress | None) -> PlanningOutcome:
    if name == "planned":
        schedule: Schedule | None = plan_job(job, progress=progress).schedule
    else:
        schedule = None if name == "online" else fixed_schedule(name, job.base)
    simulation = simulate_job(schedule, job, blocking=blocking, progress=progress)
    return PlanningOutcome(
        name=name,
        simulation=simulation,
        lower_bound=job_bound(job, progress=progress),
        cause=None if job.is_one_pipeline else find_cause(simulation),
    )
