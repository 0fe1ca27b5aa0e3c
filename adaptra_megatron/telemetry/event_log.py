# SPDX-License-Identifier: Apache-2.0
"""Write and read the event log of a run: one file of JSON lines per rank, of limited size, readable after any crash.

Every rank writes its own, so that a failover or a fault is recorded even if the leader is out of reach. What only the
leader knows (detections, plans, switches) is in the leader's file. `read_events` merges all files by time.

Each line reaches the kernel in one write, so a killed process tears at most one line. That line is skipped on reading,
and cut off before anything is appended. Files are not synced: a host that loses power may lose the last seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from adaptra_megatron.telemetry.background_writer import BackgroundWriter, is_no_file
from adaptra_megatron.telemetry.events import Event, EventError, RunStarted, Stamp, StampedEvent, decode, encode

FILE_PATTERN = "events-*.jsonl"
MAX_NBYTES = 4 << 20
"""Size at which a file is renamed and a new one begins: some thousand plans of a large pipeline."""
MAX_OLD_FILES = 3
"""Renamed files kept per rank; the oldest is dropped."""
QUEUED_EVENTS = 4096


class EventLogError(ValueError):
    """An event log that cannot be read. Names the file, the line and what is wrong."""


def event_path(directory: Path | str, rank: int, age: int = 0) -> Path:
    """Return the event file of `rank`: the one being written (age 0), or the renamed one of that age."""
    return Path(directory) / f"events-{rank:05d}{f'.{age}' if age else ''}.jsonl"


class EventFile:
    """Appends events to the file of one rank. Not thread-safe. Every method raises OSError if the disk does.

    A file that reaches `max_nbytes` is renamed and a new one begins; `max_old_files` are kept. Each begins with
    RunStarted.
    """

    def __init__(
        self,
        directory: Path | str,
        start: StampedEvent,
        *,
        max_nbytes: int = MAX_NBYTES,
        max_old_files: int = MAX_OLD_FILES,
    ) -> None:
        """Open the file. `start`: a stamped RunStarted, which is written now and at the head of each further file."""
        self._directory, self._rank = Path(directory), start.stamp.rank
        self._start = _line(start)
        self._max_nbytes, self._max_old_files = max_nbytes, max_old_files
        self._directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()
        self._append(self._start)

    def append(self, stamped: StampedEvent) -> None:
        """Write one line. Raises TypeError or ValueError, and writes nothing, if JSON cannot hold the event."""
        self._append(_line(stamped))

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        path = event_path(self._directory, self._rank)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with path.open("rb") as file:
            whole = file.read().rfind(b"\n") + 1
        os.ftruncate(descriptor, whole)  # a line that an earlier run could not finish
        self._nbytes = whole
        return descriptor

    def _append(self, line: bytes) -> None:
        if self._nbytes and self._nbytes + len(line) > self._max_nbytes:
            self._set_aside()
            if line != self._start:
                self._write(self._start)
        self._write(line)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._nbytes += len(line)

    def _set_aside(self) -> None:
        os.close(self._descriptor)
        for age in range(self._max_old_files, 0, -1):
            younger = event_path(self._directory, self._rank, age - 1)
            if younger.exists():
                younger.replace(event_path(self._directory, self._rank, age))
        event_path(self._directory, self._rank).unlink(missing_ok=True)
        self._descriptor = self._open()


class EventLog:
    """Stamps a rank's events and writes them. Thread-safe.

    No call blocks or raises: see BackgroundWriter.
    """

    def __init__(
        self,
        directory: Path | str,
        start: RunStarted,
        *,
        run: str,
        rank: int,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        clock_offset_s: float = 0.0,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        """Start the log. `run`: name of this start of the job, the same on all ranks. `wall_s`, `monotonic_s`: clocks
        of this host. `clock_offset_s`: see TraceWriter."""
        self._run, self._rank = run, rank
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._clock_offset_s = clock_offset_s
        self._lock = threading.Lock()
        self._sequence = 0
        self.iteration = -1
        """Iteration stamped on events that are logged without one; set by the training thread."""
        stamped_start = self._stamped(start, None)

        def write_all(events: Iterator[StampedEvent]) -> None:
            file = EventFile(directory, stamped_start, max_nbytes=max_nbytes)
            try:
                for stamped in events:
                    file.append(stamped)
            finally:
                file.close()

        what = f"events of rank {rank} to {event_path(directory, rank)}"
        self._writer = BackgroundWriter(what, write_all, limit=QUEUED_EVENTS)

    def log(self, event: Event, iteration: int | None = None) -> None:
        """Write an event that happened now; returns at once. `iteration`: if it is not the current one."""
        with self._lock:  # so that lines are in the order of their numbers
            self._writer.put(self._stamped(event, iteration))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`. May be called twice."""
        self._writer.close(timeout_s)

    def _stamped(self, event: Event, iteration: int | None) -> StampedEvent:
        stamp = Stamp(
            run=self._run,
            rank=self._rank,
            sequence=self._sequence,
            iteration=self.iteration if iteration is None else iteration,
            wall_s=self._wall_s(),
            monotonic_s=self._monotonic_s() + self._clock_offset_s,
        )
        self._sequence += 1
        return StampedEvent(stamp=stamp, event=event)


class Damage(NamedTuple):
    """Damage of a file, or of one of its lines."""

    path: Path
    why: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.why}" if self.line is None else f"{self.path}, {self.of_line}"

    @property
    def of_line(self) -> str:
        """The damage without the file's name."""
        return self.why if self.line is None else f"line {self.line}: {self.why}"


def read_events(directory: Path | str, damage: Callable[[Damage], object] | None = None) -> list[StampedEvent]:
    """Read the events of all ranks of the latest run in `directory`, by time; empty if there are none.

    An incomplete last line of a rank is left out. Other invalid lines raise EventLogError or, if `damage` is given,
    are left out, and it is called with each. Raises OSError if a file cannot be read.
    """
    found: dict[tuple[str, int, int], StampedEvent] = {}
    for path in sorted(Path(directory).glob(FILE_PATTERN)):
        for stamped in read_event_file(path, damage):
            stamp = stamped.stamp
            found[stamp.run, stamp.rank, stamp.sequence] = stamped
    starts = [stamped.stamp for stamped in found.values() if isinstance(stamped.event, RunStarted)]
    if not starts:
        return []
    latest = max(starts, key=lambda stamp: stamp.wall_s).run
    events = [stamped for stamped in found.values() if stamped.stamp.run == latest]
    return sorted(events, key=lambda stamped: (stamped.stamp.monotonic_s, stamped.stamp.rank, stamped.stamp.sequence))


def read_event_file(path: Path, damage: Callable[[Damage], object] | None = None) -> Iterator[StampedEvent]:
    """Read the events of one file, of all runs in it. `damage` and errors: see `read_events`."""
    if is_no_file(path):
        problem = Damage(path, "is no file")
        if damage is None:
            raise EventLogError(str(problem))
        damage(problem)
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line)
        except EventError as error:
            problem = Damage(path, str(error), number)
            if damage is None:
                raise EventLogError(str(problem)) from error
            damage(problem)


def _line(stamped: StampedEvent) -> bytes:
    return encode(stamped).encode() + b"\n"
