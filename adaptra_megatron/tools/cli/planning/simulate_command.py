# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra simulate`: the time of a schedule under given costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import Progress, find_cause, job_bound, simulate_job
from adaptra_megatron.tools.cli.planning.cells import asks_for_routing, routed_outcome
from adaptra_megatron.tools.cli.planning.comparison import compare, row_of
from adaptra_megatron.tools.cli.planning.cost_inputs import Axis, read_given, what_if
from adaptra_megatron.tools.cli.planning.inputs import SCHEDULE_NAMES, InputError, fixed_schedule, placed_for, read_text
from adaptra_megatron.tools.cli.planning.presenting import (
    WHERE_COSTS_ARE,
    PlanningOutcome,
    add_shared_options,
    asks_for_drawings,
    present,
)
from adaptra_megatron.tools.cli.planning.sweep import sweep
from adaptra_megatron.tools.cli.terminal import no_cycle_collection, shown_progress


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_shared_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    given, asked = read_given(options.costs, options.plan, options.pipeline_size), what_if(options)
    given = replace(given, job=placed_for(options.schedule, given.job))
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
        if axes:
            table.show(as_json=options.json)
        elif routed:
            alternative.show(as_json=options.json)
        else:
            present(outcome, comparison, given, options)


def _note_overlaps(schedule: str | None) -> None:
    """Print on stderr that overlapped actions of a CSV file are simulated one after the other."""
    if schedule is not None and Path(schedule).is_file() and ")OVERLAP_" in read_text(Path(schedule)):
        print(f"note: {schedule} overlaps actions; they are timed one after the other here", file=sys.stderr)


def _refuse_contradictions(options: argparse.Namespace, axes: Sequence[Axis]) -> None:
    routed = asks_for_routing(options)
    if routed and (axes or options.blocking or asks_for_drawings(options) or options.schedule in ("planned", "online")):
        raise InputError(
            "--slow-cell and --dead are timed beside a fixed schedule: leave out --blocking (stock's order, the "
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
