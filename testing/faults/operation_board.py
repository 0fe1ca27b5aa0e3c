# SPDX-License-Identifier: Apache-2.0
"""How many collectives of each rank are under way or late, in a file that all ranks map: what was struck by a death,
and the proof that lateness was in force."""

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
"""Collectives that have begun and not ended, and that are being held back; whether this rank waits for those that have
died to stand ready again; and what it has launched last, as `note_launch` says it."""
KINDS = ("collectives", "store", "threads", "messages")
"""What can be late: see `lateness`. How often each was, so far."""
_COLUMNS = (*PRESENT, *KINDS)
_COUNTS, _DEATHS = "operations", "deaths.jsonl"


class OperationBoard:
    """One rank's row. For all threads."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        """`directory`: of this run, the same on all ranks."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._rank, self._lock = directory, rank, threading.Lock()
        self._rows = _mapped(directory, world_size)
        self._rows[rank, : len(PRESENT)] = 0  # a process that takes the place of another has none yet

    def add(self, what: str, count: int = 1) -> None:
        """Count `what`: of PRESENT or KINDS."""
        with self._lock:
            self._rows[self._rank, _COLUMNS.index(what)] += count

    def count(self, what: str) -> int:
        """Of all ranks together."""
        return int(self._rows[:, _COLUMNS.index(what)].sum())

    def note_launch(self, operation: str) -> None:
        """This rank has launched `operation`, which has one name on all ranks that take part."""
        self._rows[self._rank, _COLUMNS.index(LAUNCHED)] = zlib.crc32(operation.encode())

    def have_launched(self, operation: str, ranks: Collection[int]) -> bool:
        """Return whether that is what all of `ranks` have launched last."""
        found = self._rows[list(ranks), _COLUMNS.index(LAUNCHED)]
        return bool((found == zlib.crc32(operation.encode())).all())

    def note_death(self) -> None:
        """This process is about to die: write down what all ranks have under way, and late."""
        line = json.dumps({"rank": self._rank, UNDER_WAY: self.count(UNDER_WAY), LATE: self.count(LATE)})
        self._rows[self._rank, : len(PRESENT)] = 0
        file = os.open(self._directory / _DEATHS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{line}\n".encode())
        os.close(file)


def read_deaths(directory: Path) -> Sequence[Mapping[str, int]]:
    """What was under way and late as each rank died, in the order of deaths; empty where none did."""
    file = directory / _DEATHS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_lateness(directory: Path) -> Mapping[str, int]:
    """How often each of KINDS was late, on all ranks together; empty without a board."""
    if not (directory / _COUNTS).exists():
        return {}
    rows = np.fromfile(directory / _COUNTS, dtype=np.int64).reshape(-1, len(_COLUMNS))
    return dict(zip(KINDS, map(int, rows.sum(axis=0)[len(PRESENT) :]), strict=True))


def _mapped(directory: Path, world_size: int) -> np.memmap:
    file = os.open(directory / _COUNTS, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, world_size * len(_COLUMNS) * np.dtype(np.int64).itemsize)  # zeros, and what others have written
    os.close(file)
    return np.memmap(directory / _COUNTS, dtype=np.int64, mode="r+", shape=(world_size, len(_COLUMNS)))
