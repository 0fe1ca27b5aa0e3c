# SPDX-License-Identifier: Apache-2.0
"""Make iterations wait for a file, which a test creates once it has seen its condition: no test depends on speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testing.faults.emulated_compute import EmulationError

FORM = "ITERATION:FILE"
HELD_S, _LOOKS_S = 120.0, 0.02


class Hold(NamedTuple):
    """Condition for `iteration` (from 0) to begin: `file` exists."""

    iteration: int
    file: Path


def parse_hold(text: str) -> Hold:
    """Parse --emulate-hold. Raises EmulationError for anything else."""
    iteration, _, file = text.partition(":")
    if not iteration.isdecimal() or not file:
        raise EmulationError(f"--emulate-hold {text!r} is not {FORM}, as 34:/tmp/seen")
    return Hold(int(iteration), Path(file))


class Holds:
    """Holds of one rank."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self._holds = holds

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0) once its files exist. Raises EmulationError after HELD_S."""
        until_s = time.monotonic() + HELD_S
        for hold in self._holds:
            while hold.iteration == iteration and not hold.file.exists():
                if time.monotonic() > until_s:
                    raise EmulationError(f"iteration {iteration}: nobody has made {hold.file} for {HELD_S:g} s")
                time.sleep(_LOOKS_S)
