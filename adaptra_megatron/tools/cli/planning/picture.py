# SPDX-License-Identifier: Apache-2.0
"""An iteration as text: one row per stage or cell, one column per moment, one letter per action."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation
from adaptra_megatron.schedule.simulator import Simulation

_LETTERS = "F forward, I and W the halves of a backward, B a whole one"
_COLUMNS = 100
_MOST_ROWS = 64
_IDLE = "."


def picture(simulation: RoutedSimulation, costs: RoutedCosts) -> list[str]:
    """The lines: what each column is, and a row for each cell (of a large job: for those that give or take work)."""
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
    """The lines of one pipeline: a row for each stage, over `axis_s` seconds in all."""
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
    """Position of the action that runs at `moment_s`."""
    position = bisect_right(start_s, moment_s) - 1
    return None if position < 0 or end_s[position] <= moment_s else position


def _shown(simulation: RoutedSimulation, costs: RoutedCosts) -> Sequence[Cell]:
    if len(costs.cells) <= _MOST_ROWS:
        return costs.cells
    moves = simulation.schedule.routing.moves()
    involved = {cell for move in moves for cell in (move.source, move.target)} | costs.dead
    return sorted(involved)[:_MOST_ROWS] or costs.cells[:_MOST_ROWS]


def _letter(simulation: RoutedSimulation, number: int, moment_s: float, replica: int) -> str:
    position = _running(simulation.start_s[number], simulation.end_s[number], moment_s)
    if position is None:
        return _IDLE
    action = simulation.schedule.orders[number][position]
    letter = action.kind.value
    return letter if action.replica == replica else letter.lower()
