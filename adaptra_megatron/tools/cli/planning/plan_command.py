# SPDX-License-Identifier: Apache-2.0
"""`adaptra plan`: the best schedule for given costs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import (
    Progress,
    find_cause,
    fixed_order,
    simulate_job,
    simulate_job_online,
)
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.tools.cli.planning.cells import asks_for_routing, routed_outcome
from adaptra_megatron.tools.cli.planning.changed_costs import Axis, what_if
from adaptra_megatron.tools.cli.planning.comparison import compare
from adaptra_megatron.tools.cli.planning.cost_inputs import read_given
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.cli.planning.job_outcome import JobOutcome, PlanningOutcome
from adaptra_megatron.tools.cli.planning.presenting import WHERE_COSTS_ARE, PresentedAnswer, add_shared_options, present
from adaptra_megatron.tools.cli.planning.questions import Exchange, Loss, WonBack, add_question_options
from adaptra_megatron.tools.cli.planning.sweep import sweep
from adaptra_megatron.tools.cli.progress import no_cycle_collection, shown_progress


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest schedule within the memory cap, and what is lost and could be won",
        description="Find the fastest schedule within the memory cap; with replicas, one for all of them. Say what it\n"
        "takes beside a healthy job, stock's order and the order that a healthy job would run.\n\n" + WHERE_COSTS_ARE,
    )
    parser.add_argument("--deadline-s", type=seconds, metavar="SECONDS", help="approximate planning time")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="also write the schedule to this file")
    add_shared_options(parser)
    add_question_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    given, asked = read_given(options.costs, options.plan, options.pipeline_size), what_if(options)
    axes = asked.axes(given.job)
    _refuse_what_a_table_cannot_do(options, axes)
    deadline_s = options.deadline_s
    with no_cycle_collection():
        with shown_progress(options.progress) as progress:
            if options.lose is not None:
                loss = Loss(given, asked, options.lose, deadline_s)
            elif axes:
                table = sweep(given.job, asked, axes, deadline_s=deadline_s, progress=progress)
            elif asks_for_routing(options):
                routed = routed_outcome(asked.applied_to(given.job), options, deadline_s=deadline_s)
            else:
                job = asked.applied_to(given.job)
                outcome = (_one if job.is_one_pipeline else _many)(job, deadline_s, progress)
                assert outcome.schedule is not None
                planned = outcome.schedule, simulate_job(outcome.schedule, job)
                comparison = compare(given, asked, planned=planned, deadline_s=deadline_s, progress=progress)
                answers: list[PresentedAnswer] = []
                if options.win_back:
                    answers.append(WonBack(comparison, options.activation_gib, deadline_s))
                if options.exchange is not None:
                    answers.append(Exchange(comparison, options.exchange))
                if options.csv is not None:
                    _write(options.csv, outcome.schedule)
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


def _one(job: JobCosts, deadline_s: float | None, progress: Progress | None) -> PlanningOutcome:
    costs = job.groups[0].costs
    start = time.perf_counter()
    found = plan(costs, deadline_s=deadline_s, progress=progress)
    planning_s = time.perf_counter() - start
    return PlanningOutcome(
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
