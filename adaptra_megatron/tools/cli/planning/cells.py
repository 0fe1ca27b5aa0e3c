# SPDX-License-Identifier: Apache-2.0
"""Plan and simulate jobs with slow or dead cells: options, and output as tables, JSON and text.

A text picture shows an iteration: one row per stage or cell, one column per period, one letter per action.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, Override, ranges
from adaptra_megatron.schedule.jobs.job_simulation import simulate_job
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import RoutedPlan, plan_routed
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation
from adaptra_megatron.schedule.simulator import Simulation
from adaptra_megatron.tools.cli.planning.inputs import InputError, fixed_schedule
from adaptra_megatron.tools.cli.planning.sweep import STOCK
from adaptra_megatron.tools.cli.terminal import print_table

_LETTERS = "F forward, I and W the halves of a backward, B a whole one"
_COLUMNS = 100
_MOST_DRAWN_ROWS = 64
_IDLE = "."


def picture(simulation: RoutedSimulation, costs: RoutedCosts) -> list[str]:
    """Return the lines of a picture: a legend, and a row per cell (in a large job: per rerouted or dead cell)."""
    column_s = simulation.makespan_s / _COLUMNS
    shown = _shown(simulation, costs)
    width = max(len(str(cell)) for cell in shown)
    lines = [f"  a column is {column_s:.3g} s: {_LETTERS}; small letters: another replica's"]
    number = {cell: index for index, cell in enumerate(costs.cells)}
    for cell in shown:
        row = (
            "dead"
            if cell in costs.dead
            else "".join(
                _letter(simulation, number[cell], (column + 0.5) * column_s, cell.replica) for column in range(_COLUMNS)
            )
        )
        lines.append(f"  {str(cell).rjust(width)} {row}")
    if len(shown) < len(costs.cells):
        lines.append(f"  and {len(costs.cells) - len(shown)} more cells")
    return lines


def stage_picture(simulation: Simulation, axis_s: float) -> list[str]:
    """Return the lines of one pipeline's picture: a legend, and a row per stage, over `axis_s` seconds."""
    column_s = axis_s / _COLUMNS
    width = len(str(len(simulation.start_s) - 1))
    lines = [f"  a column is {column_s:.3g} s: {_LETTERS}"]
    for stage, order in enumerate(simulation.schedule.orders):
        spans = simulation.start_s[stage], simulation.end_s[stage]
        row = (_running(*spans, (column + 0.5) * column_s) for column in range(_COLUMNS))
        letters = "".join(_IDLE if position is None else order[position].kind.value for position in row)
        lines.append(f"  {str(stage).rjust(width)} {letters}")
    return lines


def _running(start_s: Sequence[float], end_s: Sequence[float], moment_s: float) -> int | None:
    """Return the index of the action that runs at `moment_s`; None if none does."""
    position = bisect_right(start_s, moment_s) - 1
    return None if position < 0 or end_s[position] <= moment_s else position


def _shown(simulation: RoutedSimulation, costs: RoutedCosts) -> Sequence[Cell]:
    if len(costs.cells) <= _MOST_DRAWN_ROWS:
        return costs.cells
    moves = simulation.schedule.routing.moves()
    involved = {cell for move in moves for cell in (move.source, move.target)} | costs.dead
    return sorted(involved)[:_MOST_DRAWN_ROWS] or costs.cells[:_MOST_DRAWN_ROWS]


def _letter(simulation: RoutedSimulation, number: int, moment_s: float, replica: int) -> str:
    position = _running(simulation.start_s[number], simulation.end_s[number], moment_s)
    if position is None:
        return _IDLE
    action = simulation.schedule.orders[number][position]
    letter = action.kind.value
    return letter if action.replica == replica else letter.lower()


_MOST_ROWS = 16
"""Maximum number of rows of the table of moves."""


@dataclass(frozen=True, kw_only=True)
class RoutedOutcome:
    """A routed plan, and the time without routing."""

    name: str
    """The schedule that every replica would run by itself."""
    unrouted_s: float | None
    """Seconds of that; None if a dead cell stops it."""
    costs: RoutedCosts
    plan: RoutedPlan
    planning_s: float

    def show(self, *, as_json: bool) -> None:
        """Print the outcome: one JSON object on one line, or tables and a picture."""
        (self._print_json if as_json else self._print_text)()

    def _print_json(self) -> None:
        plan, costs = self.plan, self.costs
        peaks = plan.simulation.peak_in_flight
        orders = zip(costs.cells, plan.schedule.orders, strict=True)
        document = {
            "makespan_s": plan.simulation.period_s,
            "lower_bound_s": plan.lower_bound.seconds,
            "gap": plan.gap,
            "peak_in_flight": [max(peaks[stage :: costs.stages]) for stage in range(costs.stages)],
            "planning_s": self.planning_s,
            "unrouted": {"schedule": self.name, "makespan_s": self.unrouted_s, "planned_s": plan.present_s},
            "dead": [str(cell) for cell in sorted(costs.dead)],
            "moves": [
                {"from": str(move.source), "to": str(move.target), "micro_batches": list(move.micro_batches)}
                for move in plan.routing.moves()
            ],
            "orders": {
                str(cell): [f"{action.kind}{action.replica}.{action.micro_batch}" for action in order]
                for cell, order in orders
            },
        }
        print(json.dumps(document, allow_nan=False))

    def _print_text(self) -> None:
        plan, costs = self.plan, self.costs
        print(
            f"routed: {costs.stages} stages x {costs.job.replicas} replicas, {costs.micro_batches} micro-batches each"
        )
        stopped = "stops: " + ", ".join(f"cell {cell} is dead" for cell in sorted(costs.dead))
        rows = [
            (
                self.name,
                stopped if self.unrouted_s is None else f"{self.unrouted_s:.6g} s",
                self._gain(self.unrouted_s),
            ),
            (
                "planned, not routed",
                "-" if plan.present_s is None else f"{plan.present_s:.6g} s",
                self._gain(plan.present_s),
            ),
            ("routed", f"{plan.simulation.period_s:.6g} s", ""),
            ("lower bound", f"{plan.lower_bound.seconds:.6g} s ({plan.lower_bound.where})", f"gap {plan.gap:.2%}"),
        ]
        print_table(("", "makespan", "routed is"), rows)
        print(f"  planned in   {self.planning_s:.3g} s")
        self._print_moves()
        for line in picture(plan.simulation, costs):
            print(line)

    def _gain(self, seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds / self.plan.simulation.period_s:.3g} x faster"

    def _print_moves(self) -> None:
        moves = self.plan.routing.moves()
        if not moves:
            print("  nothing is moved: it would not pay")
            return
        moved = sum(len(move.micro_batches) for move in moves)
        print(f"  moved        {moved} of {sum(map(len, self.plan.routing.hosts))} micro-batches of a stage")
        rows = [(str(move.source), str(move.target), ranges(move.micro_batches)) for move in moves[:_MOST_ROWS]]
        print_table(("from cell", "to cell", "micro-batches"), rows)
        if len(moves) > _MOST_ROWS:
            print(f"  and {len(moves) - _MOST_ROWS} more pairs of cells")


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
    """Return the routed plan for `job` with the cells of `options`, and the time of a fixed schedule. `schedule`: its
    name; None: stock's, which blocks.

    Raises InputError for cells that the job does not have, ScheduleError as `simulate_job`.
    """
    slow = [Override(replicas=(cell.replica,), slow_stages={cell.stage: factor}) for cell, factor in options.slow_cells]
    try:
        job = replace(job, overrides=(*job.overrides, *slow))
        costs = RoutedCosts(job=job, dead=frozenset(options.dead))
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
