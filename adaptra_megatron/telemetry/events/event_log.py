# SPDX-License-Identifier: Apache-2.0
"""The event log of a run: one file of JSON lines per rank, bounded, readable after any crash.

Every rank writes its own: a failover or a fault is seen where it happens, also while the leader is out of reach. What
the leader alone knows (detections, plans, switches) is in the leader's file. `read_events` puts them in one order.

Each line reaches the kernel by one write, so a killed process tears at most the line it was writing; that line is left
out on reading and cut off before anything is appended. Nothing is forced to the disk: a host that loses power may lose
the last seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from adaptra_megatron.telemetry.background_writer import BackgroundWriter, is_no_file
from adaptra_megatron.telemetry.events.events import Event, EventError, RunStarted, Stamp, StampedEvent, decode, encode

FILE_PATTERN = "events-*.jsonl"
MAX_NBYTES = 4 << 20
"""Size at which a file is set aside and another begun: some thousand plans of a large pipeline."""
MAX_OLD_FILES = 3
"""Kept per rank; the oldest goes."""
QUEUED_EVENTS = 4096


class EventLogError(ValueError):
    """An event log that cannot be read: the message names the file, the line and what is wrong."""


class Clock(Protocol):
    """Clock of an event log."""

    def wall_s(self) -> float:
        """Seconds since the epoch."""

    def monotonic_s(self) -> float:
        """Seconds of the monotonic clock of this host."""


class SystemClock:
    """The clocks of this host."""

    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


def event_path(directory: Path | str, rank: int, age: int = 0) -> Path:
    """Return the event file of `rank`: the one being written (age 0), or the rotated one of that age."""
    return Path(directory) / f"events-{rank:05d}{f'.{age}' if age else ''}.jsonl"


class EventFile:
    """Appends events to the file of one rank; for one thread. Every method raises OSError if the disk does.

    A file of `max_nbytes` is set aside and another begun, `max_old_files` are kept. Each begins with a run's start.
    """

    def __init__(
        self,
        directory: Path | str,
        start: StampedEvent,
        *,
        max_nbytes: int = MAX_NBYTES,
        max_old_files: int = MAX_OLD_FILES,
    ) -> None:
        """`start`: stamps a RunStarted; it is written at once, and again at the head of each further file."""
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
    """Log of the runtime: stamps events and has them written. For any number of threads.

    Nothing here blocks or raises into training: see BackgroundWriter.
    """

    def __init__(
        self,
        directory: Path | str,
        start: RunStarted,
        *,
        run: str,
        rank: int,
        clock: Clock | None = None,
        clock_offset_s: float = 0.0,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        """`run`: the same on all ranks, new for each start. `clock_offset_s`: as for TraceWriter."""
        self._run, self._rank = run, rank
        self._clock: Clock = SystemClock() if clock is None else clock
        self._clock_offset_s = clock_offset_s
        self._lock = threading.Lock()
        self._sequence = 0
        self.iteration = -1
        """Stamped on what is logged without one; the training thread counts it up."""
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
        """Write an event that happened now, in `iteration` if not in the present one; returns at once."""
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
            wall_s=self._clock.wall_s(),
            monotonic_s=self._clock.monotonic_s() + self._clock_offset_s,
        )
        self._sequence += 1
        return StampedEvent(stamp=stamp, event=event)


class Damage(NamedTuple):
    """Damage of a file, or with one line of it."""

    path: Path
    why: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.why}" if self.line is None else f"{self.path}, {self.of_line}"

    @property
    def of_line(self) -> str:
        """The same without the file's name."""
        return self.why if self.line is None else f"line {self.line}: {self.why}"


def read_events(directory: Path | str, damage: Callable[[Damage], object] | None = None) -> list[StampedEvent]:
    """The events of all ranks of the latest run in `directory`, by time; empty if there are none.

    A last line that its rank could not finish is left out. Where `damage` is given, all other lines that are no event
    are left out, too, and it is called with what is wrong with each; else they raise EventLogError. Raises OSError if a
    file cannot be read.
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
    """The events of one file, of all runs in it. `damage`, and what is raised: as `read_events`."""
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
