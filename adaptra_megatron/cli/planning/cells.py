# SPDX-License-Identifier: Apache-2.0
"""Options of `adaptra plan` and `adaptra simulate` for single cells: slow ones, and ones that take no work."""

from __future__ import annotations

import argparse
import math
import re
import time

from adaptra_megatron.cli.planning.inputs import InputError, fixed_schedule
from adaptra_megatron.cli.planning.routed_outcome import RoutedOutcome
from adaptra_megatron.cli.planning.sweep import STOCK
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.jobs.costs import JobCosts, Override
from adaptra_megatron.schedule.jobs.simulation import simulate_job
from adaptra_megatron.schedule.routing.costs import Cell, routed_costs
from adaptra_megatron.schedule.routing.planner import plan_routed


def add_cell_options(parser: argparse.ArgumentParser) -> None:
    """Add `--slow-cell` and `--dead`."""
    group = parser.add_argument_group(
        "cells", "a cell is one stage of one replica; with these, micro-batches may run at other replicas' cells"
    )
    group.add_argument(
        "--slow-cell",
        dest="slow_cells",
        action="append",
        default=[],
        type=_slow_cell,
        metavar="REPLICA.STAGE:FACTOR",
        help="a cell whose actions all take FACTOR times as long, such as 0.0:2.4",
    )
    group.add_argument(
        "--dead",
        action="append",
        default=[],
        type=_dead_cell,
        metavar="REPLICA.STAGE",
        help="a cell that takes no work",
    )


def asks_for_routing(options: argparse.Namespace) -> bool:
    """Return whether any cell is named."""
    return bool(options.slow_cells or options.dead)


def routed_outcome(
    job: JobCosts, options: argparse.Namespace, *, schedule: str | None = None, deadline_s: float | None = None
) -> RoutedOutcome:
    """What routing makes of `job` with the cells of `options`, beside a fixed schedule (None: stock's, which blocks).

    Raises InputError for cells that the job does not have, ScheduleError as `simulate_job`.
    """
    slow = [Override(replicas=(cell.replica,), slow_stages={cell.stage: factor}) for cell, factor in options.slow_cells]
    try:
        job = job.changed(*slow)
        costs = routed_costs(job, dead=options.dead)
    except CostError as error:
        raise InputError(f"cells: {error}") from error
    start = time.perf_counter()
    plan = plan_routed(costs, deadline_s=deadline_s)
    planning_s = time.perf_counter() - start
    base, unrouted_s = job.base, None
    if not options.dead:
        stock = schedule is None
        fixed = fixed_schedule(schedule, base) if schedule else stock_order(base.stages, base.micro_batches)
        unrouted_s = simulate_job(fixed, job, blocking=stock).makespan_s
    return RoutedOutcome(name=schedule or STOCK, unrouted_s=unrouted_s, costs=costs, plan=plan, planning_s=planning_s)


def _slow_cell(text: str) -> tuple[Cell, float]:
    place, _, factor = text.partition(":")
    try:
        found = float(factor)
    except ValueError:
        found = math.nan
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0.0:2.4, a cell and a factor above 0")
    return _cell(place, text), found


def _dead_cell(text: str) -> Cell:
    return _cell(text, text)


def _cell(place: str, text: str) -> Cell:
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", place)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with a cell such as 1.2: replica 1, stage 2")
    return Cell(int(found[1]), int(found[2]))
