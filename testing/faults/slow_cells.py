# SPDX-License-Identifier: Apache-2.0
"""Lengthen the emulated compute of cells (stages of data-parallel replicas) for some iterations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from testing.faults.emulated_compute import EmulationError

FORM = "REPLICA.STAGE:FACTOR[,from=I][,until=J]"
_PATTERN = re.compile(r"(\d+)\.(\d+):([0-9.]+)(?:,from=(\d+))?(?:,until=(\d+))?")


@dataclass(frozen=True)
class SlowCell:
    """Slowdown of one cell, by `factor`, in iterations `begin` to `until` - 1."""

    replica: int
    stage: int
    factor: float
    begin: int
    until: float


def parse_slow_cell(text: str) -> SlowCell:
    """Parse `--emulate-slow-cell`. Raises EmulationError for anything else, and for a factor that is not above 0."""
    found = _PATTERN.fullmatch(text)
    factor = float(found[3]) if found and found[3].count(".") < 2 and found[3] != "." else 0.0
    if found is None or factor <= 0:
        raise EmulationError(f"--emulate-slow-cell {text!r} is not {FORM} with a factor above 0, as 0.1:2.4,from=5")
    until = math.inf if found[5] is None else float(found[5])
    return SlowCell(int(found[1]), int(found[2]), factor, int(found[4] or 0), until)


class CellSpeed:
    """Speed of one cell in each iteration."""

    def __init__(self, cells: Sequence[SlowCell], replica: int, stage: int) -> None:
        self._ours = [cell for cell in cells if (cell.replica, cell.stage) == (replica, stage)]
        self.factor = 1.0
        """Present factor on all durations."""
        self.slowed = 0
        """Number of iterations with a slowdown so far."""

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0)."""
        self.factor = math.prod(cell.factor for cell in self._ours if cell.begin <= iteration < cell.until)
        self.slowed += self.factor != 1.0
