# SPDX-License-Identifier: Apache-2.0
"""`adaptra plan`: the best schedule for given costs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from adaptra_megatron.cli.garbage import no_cycle_collection
from adaptra_megatron.cli.planning.cells import add_cell_options, asks_for_routing, routed_outcome
from adaptra_megatron.cli.planning.inputs import InputError, read_job, seconds
from adaptra_megatron.cli.planning.job_outcome import JobOutcome
from adaptra_megatron.cli.planning.outcome import Outcome
from adaptra_megatron.cli.planning.routed_outcome import RoutedOutcome
from adaptra_megatron.cli.planning.sweep import Sweep, sweep
from adaptra_megatron.cli.planning.what_if import add_what_if_options, changed_job, swept_value
from adaptra_megatron.cli.progress import add_progress_option, shown_progress
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.jobs.costs import JobCosts
from adaptra_megatron.schedule.jobs.planner import plan_job
from adaptra_megatron.schedule.jobs.simulation import Progress, find_cause, fixed_order, simulate_job_online
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest schedule within the memory cap",
        description="Find the fastest schedule within the memory cap; with replicas, one for all of them.",
    )
    parser.add_argument("costs", type=Path, metavar="COSTS.json", help="seconds of stages and links, caps, replicas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=seconds, metavar="SECONDS", help="approximate planning time")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="also write the schedule to this file")
    add_progress_option(parser)
    add_what_if_options(parser)
    add_cell_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    job, swept = read_job(options.costs), swept_value(options.changes)
    if swept is not None and options.csv is not None:
        raise InputError("--csv is for one plan: leave it out, or give a value instead of the range")
    if asks_for_routing(options) and (swept is not None or options.csv is not None):
        raise InputError("--slow-cell and --dead make one routed plan: leave out --csv, and ranges of other options")
    deadline_s = options.deadline_s
    with no_cycle_collection():
        with shown_progress(options.progress) as progress:
            if swept is not None:
                outcome: Outcome | JobOutcome | RoutedOutcome | Sweep = sweep(
                    job, options.changes, swept, replicas=options.replicas, deadline_s=deadline_s, progress=progress
                )
            elif asks_for_routing(options):
                job = changed_job(job, options.changes, replicas=options.replicas)
                outcome = routed_outcome(job, options, deadline_s=deadline_s)
            else:
                job = changed_job(job, options.changes, replicas=options.replicas)
                outcome = (_one if job.is_one_pipeline else _many)(job, deadline_s, progress)
                if options.csv is not None:
                    _write(options.csv, outcome.schedule)
        outcome.show(as_json=options.json)


def _one(job: JobCosts, deadline_s: float | None, progress: Progress | None) -> Outcome:
    costs = job.groups[0].costs
    start = time.perf_counter()
    found = plan(costs, deadline_s=deadline_s, progress=progress)
    planning_s = time.perf_counter() - start
    return Outcome(
        name="planned",
        costs=costs,
        simulation=simulate(found.schedule, costs),
        lower_bound=found.lower_bound,
        schedule=found.schedule,
        planning_s=planning_s,
    )


def _many(job: JobCosts, deadline_s: float | None, progress: Progress | None) -> JobOutcome:
    start = time.perf_counter()
    found = plan_job(job, deadline_s=deadline_s, progress=progress)
    planning_s = time.perf_counter() - start
    return JobOutcome(
        name="planned",
        simulation=found.simulation,
        lower_bound=found.lower_bound,
        cause=find_cause(found.simulation, fixed_order(found.schedule, job.base)),
        schedule=found.schedule,
        planning_s=planning_s,
        online_makespan_s=simulate_job_online(job, progress=progress).makespan_s,
    )


def _write(path: Path, schedule: Schedule | None) -> None:
    assert schedule is not None
    try:
        path.write_text(schedule_to_csv(schedule), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
