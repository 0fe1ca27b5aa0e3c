# SPDX-License-Identifier: Apache-2.0
"""`adaptra simulate`: what a schedule takes under given costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from adaptra_megatron.cli.garbage import no_cycle_collection
from adaptra_megatron.cli.planning.cells import add_cell_options, asks_for_routing, routed_outcome
from adaptra_megatron.cli.planning.inputs import SCHEDULE_NAMES, InputError, fixed_schedule, placed_for, read_job
from adaptra_megatron.cli.planning.job_outcome import JobOutcome
from adaptra_megatron.cli.planning.outcome import Outcome
from adaptra_megatron.cli.planning.routed_outcome import RoutedOutcome
from adaptra_megatron.cli.planning.sweep import Sweep, sweep
from adaptra_megatron.cli.planning.what_if import add_what_if_options, changed_job, swept_value
from adaptra_megatron.cli.progress import add_progress_option, shown_progress
from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.jobs.costs import JobCosts
from adaptra_megatron.schedule.jobs.planner import plan_job
from adaptra_megatron.schedule.jobs.simulation import (
    Finish,
    Progress,
    find_cause,
    fixed_order,
    job_bound,
    online_order,
    simulate_job,
    simulate_job_online,
)
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate, simulate_online


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "simulate",
        help="time a schedule",
        description="Time a schedule, in all replicas if there are some; classic ones may pass the memory cap.",
    )
    parser.add_argument("costs", type=Path, metavar="COSTS.json", help="seconds of stages and links, caps, replicas")
    parser.add_argument(
        "--schedule",
        metavar="SCHEDULE",
        help=f"{', '.join(SCHEDULE_NAMES)}, or a CSV file in torch.distributed.pipelining's format; "
        "may be left out where a what-if option has a range, and with --slow-cell and --dead",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--blocking",
        action="store_true",
        help="time sends and receives as stock Megatron-core makes them: blocking (1f1b and interleaved only)",
    )
    add_progress_option(parser)
    add_what_if_options(parser)
    add_cell_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    job, swept = placed_for(options.schedule, read_job(options.costs)), swept_value(options.changes)
    routed = asks_for_routing(options)
    if routed and (swept is not None or options.blocking or options.schedule in ("planned", "online")):
        raise InputError(
            "--slow-cell and --dead are timed beside a fixed schedule: leave out --blocking (stock's order, the "
            "default, blocks), ranges, planned and online"
        )
    if options.schedule is None and swept is None and not routed:
        raise InputError("the following arguments are required: --schedule")
    if options.blocking and (swept is not None or options.schedule == "online"):
        raise InputError(
            "--blocking needs a fixed order, online dispatch has none"
            if swept is None
            else "--blocking is for one schedule and no range: the table's stock column blocks anyway"
        )
    with no_cycle_collection():
        with shown_progress(options.progress) as progress:
            if swept is not None:
                outcome: Outcome | JobOutcome | RoutedOutcome | Sweep = sweep(
                    job, options.changes, swept, replicas=options.replicas, schedule=options.schedule, progress=progress
                )
            elif routed:
                job = changed_job(job, options.changes, replicas=options.replicas)
                outcome = routed_outcome(job, options, schedule=options.schedule)
            else:
                job = changed_job(job, options.changes, replicas=options.replicas)
                outcome = (_one if job.is_one_pipeline else _many)(job, options.schedule, options.blocking, progress)
        outcome.show(as_json=options.json)


def _one(job: JobCosts, name: str, blocking: bool, progress: Progress | None) -> Outcome:
    costs = job.groups[0].costs
    if name == "online":
        schedule, simulation = None, simulate_online(costs)
    else:
        planned = name == "planned"
        schedule = plan(costs, progress=progress).schedule if planned else fixed_schedule(name, costs)
        simulation = simulate(schedule, costs, blocking=blocking)
    return Outcome(name=name, costs=costs, simulation=simulation, lower_bound=lower_bound(costs), schedule=schedule)


def _many(job: JobCosts, name: str, blocking: bool, progress: Progress | None) -> JobOutcome:
    run: Callable[[Costs], Finish] = online_order
    if name == "online":
        schedule, simulation = None, simulate_job_online(job, progress=progress)
    else:
        planned = name == "planned"
        schedule = plan_job(job, progress=progress).schedule if planned else fixed_schedule(name, job.base)
        simulation = simulate_job(schedule, job, blocking=blocking, progress=progress)
        run = fixed_order(schedule, job.base, blocking=blocking)
    return JobOutcome(
        name=name,
        simulation=simulation,
        lower_bound=job_bound(job, progress=progress),
        cause=find_cause(simulation, run),
        schedule=schedule,
    )
