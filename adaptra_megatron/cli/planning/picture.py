# SPDX-License-Identifier: Apache-2.0
"""A job's iteration as text: one row per cell, one column per moment, one letter per action."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.simulator import RoutedSimulation

_COLUMNS = 100
_MOST_ROWS = 64
_IDLE = "."


def picture(simulation: RoutedSimulation, costs: RoutedCosts) -> list[str]:
    """The lines: what each column is, and a row for each cell (of a large job: for those that give or take work)."""
    column_s = simulation.makespan_s / _COLUMNS
    shown = _shown(simulation, costs)
    width = max(len(str(cell)) for cell in shown)
    lines = [
        f"  a column is {column_s:.3g} s: F forward, I and W the halves of a backward, B a whole one; "
        "small letters: another replica's"
    ]
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


def _shown(simulation: RoutedSimulation, costs: RoutedCosts) -> Sequence[Cell]:
    if len(costs.cells) <= _MOST_ROWS:
        return costs.cells
    moves = simulation.schedule.routing.moves()
    involved = {cell for move in moves for cell in (move.source, move.target)} | costs.dead
    return sorted(involved)[:_MOST_ROWS] or costs.cells[:_MOST_ROWS]


def _letter(simulation: RoutedSimulation, number: int, moment_s: float, replica: int) -> str:
    position = bisect_right(simulation.start_s[number], moment_s) - 1
    if position < 0 or simulation.end_s[number][position] <= moment_s:
        return _IDLE
    action = simulation.schedule.orders[number][position]
    letter = action.kind.value
    return letter if action.replica == replica else letter.lower()
