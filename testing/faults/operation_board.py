# SPDX-License-Identifier: Apache-2.0
"""Count each rank's pending and late collectives in a file that all ranks map.

It shows which operations a failure interrupted, and proves that delays were active.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

UNDER_WAY, LATE, WAITING, LAUNCHED = "under way", "late", "waiting", "launched"
PRESENT = (UNDER_WAY, LATE, WAITING, LAUNCHED)
"""Gauges: collectives in progress; collectives held back; whether this rank waits for failed ranks to be ready; last
launched operation (`note_launch`)."""
KINDS = ("collectives", "store", "threads", "messages", "interruptions")
"""Counters of delayed operations by kind: see `Lateness`."""
_COLUMNS = (*PRESENT, *KINDS)
_COUNTS, _DEATHS = "operations", "deaths.jsonl"


class OperationBoard:
    """Shared counters of all ranks; one row is this rank's. Thread-safe."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        """`directory`: of this run, the same on all ranks."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._rank, self._lock = directory, rank, threading.Lock()
        self._rows = _mapped(directory, world_size)
        self._rows[rank, : len(PRESENT)] = 0  # a process that takes the place of another has none yet

    def add(self, what: str, count: int = 1) -> None:
        """Add to an entry of PRESENT or KINDS."""
        with self._lock:
            self._rows[self._rank, _COLUMNS.index(what)] += count

    def count(self, what: str) -> int:
        """Return the sum over all ranks."""
        return int(self._rows[:, _COLUMNS.index(what)].sum())

    def note_launch(self, operation: str) -> None:
        """Record the operation that this rank launched last; its name is the same on all its ranks."""
        self._rows[self._rank, _COLUMNS.index(LAUNCHED)] = zlib.crc32(operation.encode())

    def have_launched(self, operation: str, ranks: Collection[int]) -> bool:
        """Return whether all of `ranks` have launched `operation` last."""
        found = self._rows[list(ranks), _COLUMNS.index(LAUNCHED)]
        return bool((found == zlib.crc32(operation.encode())).all())

    def note_death(self) -> None:
        """Record the state of all ranks just before this process fails."""
        line = json.dumps({"rank": self._rank, UNDER_WAY: self.count(UNDER_WAY), LATE: self.count(LATE)})
        self._rows[self._rank, : len(PRESENT)] = 0
        file = os.open(self._directory / _DEATHS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{line}\n".encode())
        os.close(file)


def read_deaths(directory: Path) -> Sequence[Mapping[str, int]]:
    """Return the state recorded at each failure, in order; empty if no rank failed."""
    file = directory / _DEATHS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_lateness(directory: Path) -> Mapping[str, int]:
    """Return how often each of KINDS was delayed, over all ranks; empty without a board."""
    if not (directory / _COUNTS).exists():
        return {}
    rows = np.fromfile(directory / _COUNTS, dtype=np.int64).reshape(-1, len(_COLUMNS))
    return dict(zip(KINDS, map(int, rows.sum(axis=0)[len(PRESENT) :]), strict=True))


def _mapped(directory: Path, world_size: int) -> np.memmap:
    file = os.open(directory / _COUNTS, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, world_size * len(_COLUMNS) * np.dtype(np.int64).itemsize)  # zeros, and what others have written
    os.close(file)
    return np.memmap(directory / _COUNTS, dtype=np.int64, mode="r+", shape=(world_size, len(_COLUMNS)))
