# SPDX-License-Identifier: Apache-2.0
"""Per-rank trace files: written beside the training, never in its way, and read back whole or torn.

A file holds JSON lines: a header (`version`, `rank`, `stage`, `clock_offset_s`), then one line per iteration,
`{"iteration": k, "records": [[kind, chunk, micro_batch, wait_start_s, start_s, end_s], ...]}`.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from adaptra_megatron.telemetry.records import ActionRecord

logger = logging.getLogger("adaptra_megatron.telemetry")

FILE_VERSION = 1
FILE_PATTERN = "rank-*.jsonl"
QUEUED_ITERATIONS = 256
"""How far the disk may fall behind before recording stops: some MB for a large pipeline, hours of a slow run."""


class TraceError(ValueError):
    """A trace that cannot be read: the message names the file, the line and what was expected."""


def trace_path(directory: Path | str, rank: int) -> Path:
    """Where `rank` writes its records."""
    return Path(directory) / f"rank-{rank:05d}.jsonl"


class TraceWriter:
    """Writes one rank's records to `trace_path(directory, rank)`; a file of an earlier run there is replaced.

    `clock_offset_s` is what to add to this rank's `time.monotonic()` to get the job's common clock: 0 for all ranks of
    one host. Nothing here blocks or raises into training: a thread encodes and writes, and when the directory cannot
    be written, the disk is full or falls `QUEUED_ITERATIONS` behind, one warning is logged and recording stops.
    """

    def __init__(self, directory: Path | str, rank: int, stage: int, *, clock_offset_s: float = 0.0) -> None:
        self._path = trace_path(directory, rank)
        self._rank = rank
        self._header = {"version": FILE_VERSION, "rank": rank, "stage": stage, "clock_offset_s": clock_offset_s}
        self._queue: queue.Queue[tuple[int, list[ActionRecord]] | None] = queue.Queue(QUEUED_ITERATIONS)
        self._failed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="adaptra-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def failed(self) -> bool:
        """Whether recording has stopped because of an error (which was logged)."""
        return self._failed.is_set()

    def write(self, iteration: int, records: Sequence[ActionRecord]) -> None:
        """Hand over one iteration's records; returns at once. Does nothing after a failure or after `close`."""
        if self._closed or self.failed:
            return
        try:
            self._queue.put_nowait((iteration, list(records)))
        except queue.Full:
            self._fail(f"{QUEUED_ITERATIONS} iterations wait for the disk")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._fail(f"{QUEUED_ITERATIONS} iterations wait for the disk at the end of training")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"the disk took more than {timeout_s:g} s for the last records")

    def _run(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("w", encoding="utf-8") as file:
                _write_line(file, self._header)
                while (item := self._queue.get()) is not None and not self.failed:
                    iteration, records = item
                    _write_line(file, {"iteration": iteration, "records": [record[2:] for record in records]})
        except (OSError, TypeError, ValueError) as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            logger.warning("rank %d: no more tracing to %s (%s); training goes on", self._rank, self._path, reason)


def _write_line(file: TextIO, document: dict[str, Any]) -> None:
    """One line, on disk at once, so that a killed rank loses at most the line being written."""
    file.write(json.dumps(document, separators=(",", ":")) + "\n")
    file.flush()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The records of one rank, in the order in which they ran, on the job's common clock (offset already added)."""

    rank: int
    stage: int
    records: tuple[ActionRecord, ...]

    def iteration(self, iteration: int) -> list[ActionRecord]:
        """The records of one iteration."""
        return [record for record in self.records if record.iteration == iteration]


def read_trace(path: Path | str) -> RankTrace:
    """Read one rank's file. A last line without an end (the rank was killed while writing) is left out.

    Raises TraceError for anything else that is not a trace, OSError if the file cannot be read.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    if not lines:
        raise TraceError(f"{path} is empty: its rank died before it wrote the header")
    try:
        header = json.loads(lines[0])
        version, rank, stage, offset_s = (header[key] for key in ("version", "rank", "stage", "clock_offset_s"))
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path}, line 1: expected a trace header, got {lines[0][:80]!r}") from error
    if version != FILE_VERSION:
        raise TraceError(f"{path} has trace version {version!r}; this package reads version {FILE_VERSION}")
    records: list[ActionRecord] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            document = json.loads(line)
            for kind, chunk, micro_batch, *times_s in document["records"]:
                wait_start_s, start_s, end_s = (time_s + offset_s for time_s in times_s)
                records.append(
                    ActionRecord(document["iteration"], stage, kind, chunk, micro_batch, wait_start_s, start_s, end_s)
                )
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{path}, line {number}: expected one iteration's records, got {line[:80]!r}") from error
    return RankTrace(rank=rank, stage=stage, records=tuple(records))


def read_traces(directory: Path | str) -> list[RankTrace]:
    """Every rank's file of a directory, by rank. Raises TraceError if there is none or one is damaged."""
    paths = sorted(Path(directory).glob(FILE_PATTERN))
    if not paths:
        raise TraceError(f"no {FILE_PATTERN} in {directory}: was the run started with --adaptra-trace-dir {directory}?")
    return sorted((read_trace(path) for path in paths), key=lambda trace: trace.rank)
