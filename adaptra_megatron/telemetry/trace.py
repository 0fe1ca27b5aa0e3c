# SPDX-License-Identifier: Apache-2.0
"""Write and read per-rank trace files. A thread writes them, so that training never waits; torn files can be read.

A file holds JSON lines: a header (`version`, `rank`, `stage`, `clock_offset_s`), then one line per iteration,
`{"iteration": k, "records": [[kind, chunk, micro_batch, wait_start_s, start_s, end_s], ...]}` and, if the transport
knows them, `"arrivals": [[source, kind, chunk, micro_batch, arrived_s], ...]`.

A file that reaches MAX_NBYTES is renamed, replacing the one renamed before, and a new one begins. So the latest
iterations are kept, in at most twice that size. Both files are read as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import msgspec

from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.telemetry.background_writer import BackgroundWriter, is_no_file

FILE_VERSION = 1
FILE_PATTERN = "rank-*.jsonl"
QUEUED_ITERATIONS = 256
"""Iterations that may wait for the disk before recording stops: some MB for a large pipeline, hours of a slow run."""

MAX_NBYTES = 64 << 20
"""About 5,000 iterations of 64 micro-batches."""
MOST_STAGES, MOST_CHUNKS, MOST_MICRO_BATCHES, MOST_NUMBER = 1 << 12, 1 << 10, 1 << 20, 1 << 48
"""Upper limits of numbers in a trace: readers make lists of that length."""
LATEST_S = 1e12
"""Largest time, positive or negative, in seconds."""
_Kind = Literal["F", "B", "I", "W"]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST_NUMBER)]
_Stage = Annotated[int, msgspec.Meta(ge=0, lt=MOST_STAGES)]
_Chunk = Annotated[int, msgspec.Meta(ge=0, lt=MOST_CHUNKS)]
_MicroBatch = Annotated[int, msgspec.Meta(ge=0, lt=MOST_MICRO_BATCHES)]
_Moment = Annotated[float, msgspec.Meta(gt=-LATEST_S, lt=LATEST_S)]


class _WrittenHeader(msgspec.Struct):
    """First line of a file."""

    version: Any
    rank: _Number
    stage: _Stage
    clock_offset_s: _Moment


class _WrittenIteration(msgspec.Struct):
    """Any other line. Unknown fields are ignored."""

    iteration: _Number
    records: list[tuple[_Kind, _Chunk, _MicroBatch, _Moment, _Moment, _Moment]]
    arrivals: list[tuple[_Stage, _Kind, _Chunk, _MicroBatch, _Moment]] = []
    clock_offset_s: _Moment | msgspec.UnsetType = msgspec.UNSET


_HEADER, _ITERATION = msgspec.json.Decoder(_WrittenHeader), msgspec.json.Decoder(_WrittenIteration)


class TraceError(ValueError):
    """A trace that cannot be read. Names the file, the line and what was expected."""


def trace_path(directory: Path | str, rank: int) -> Path:
    """Return the trace file of `rank`."""
    return Path(directory) / f"rank-{rank:05d}.jsonl"


def set_aside_path(path: Path) -> Path:
    """Return the renamed file with a rank's earlier iterations."""
    return path.with_name(f"{path.name}.1")


class _TraceFile:
    """A rank's trace file and the renamed one. Not thread-safe. Methods raise OSError."""

    def __init__(self, path: Path, header: dict[str, Any], *, max_nbytes: int, goes_on: bool) -> None:
        self._path, self._header, self._max_nbytes = path, _line(header), max_nbytes
        path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = goes_on and path.exists()
        if not goes_on:
            set_aside_path(path).unlink(missing_ok=True)
        self._file = path.open("ab" if goes_on else "wb", buffering=0)
        self._nbytes = self._file.tell()
        if not goes_on:
            self._write(self._header)

    def append(self, document: dict[str, Any]) -> None:
        """Write one line to disk at once, so that a killed rank loses at most the line being written."""
        line = _line(document)
        if self._nbytes + len(line) > self._max_nbytes and self._nbytes > len(self._header):
            self._file.close()
            self._path.replace(set_aside_path(self._path))
            self._file, self._nbytes = self._path.open("wb", buffering=0), 0
            self._write(self._header)
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._nbytes += len(line)


class TraceWriter:
    """Writes one rank's records to `trace_path(directory, rank)`.

    `goes_on`: continue the file of a process that this one replaces; otherwise, an existing file is replaced.
    `clock_offset_s`: seconds to add to this rank's `time.monotonic()` to get the job's common clock; 0 on one host. No
    call blocks or raises: a thread encodes and writes. If the directory cannot be written, the disk is full or
    `QUEUED_ITERATIONS` behind, one warning is logged and recording stops.
    """

    def __init__(
        self,
        directory: Path | str,
        rank: int,
        stage: int,
        *,
        clock_offset_s: float = 0.0,
        goes_on: bool = False,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        path = trace_path(directory, rank)
        header = {"version": FILE_VERSION, "rank": rank, "stage": stage, "clock_offset_s": clock_offset_s}

        def write_all(items: Iterator[_Iteration]) -> None:
            with closing(_TraceFile(path, header, max_nbytes=max_nbytes, goes_on=goes_on)) as file:
                for item in items:
                    file.append(item.document())

        what = f"tracing of rank {rank} to {path}"
        self._writer: BackgroundWriter[_Iteration] = BackgroundWriter(what, write_all, limit=QUEUED_ITERATIONS)

    @property
    def failed(self) -> bool:
        """Whether recording has stopped because of an error, which was logged."""
        return self._writer.failed

    def write(
        self,
        iteration: int,
        records: Sequence[ActionRecord],
        arrivals: Sequence[ArrivalRecord] = (),
        clock_offset_s: float | None = None,
    ) -> None:
        """Queue one iteration's records; returns at once. Does nothing after a failure or after `close`.

        `clock_offset_s`: offset of this iteration, if clocks drift; None: the file's.
        """
        self._writer.put(_Iteration(iteration, tuple(records), tuple(arrivals), clock_offset_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread. May be called twice."""
        self._writer.close(timeout_s)


class _Iteration(NamedTuple):
    """Records of an iteration; only the thread encodes them."""

    iteration: int
    records: tuple[ActionRecord, ...]
    arrivals: tuple[ArrivalRecord, ...]
    clock_offset_s: float | None

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"iteration": self.iteration, "records": [record[2:8] for record in self.records]}
        if self.clock_offset_s is not None:
            document["clock_offset_s"] = self.clock_offset_s
        if self.arrivals:
            document["arrivals"] = [(arrival.source, *arrival[3:]) for arrival in self.arrivals]
        return document


def _line(document: dict[str, Any]) -> bytes:
    return f"{json.dumps(document, separators=(',', ':'))}\n".encode()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Records of one rank on the job's common clock (offset added), in the order in which they ran."""

    rank: int
    stage: int
    records: tuple[ActionRecord, ...]
    arrivals: tuple[ArrivalRecord, ...] = ()
    """Arrivals of the messages that it used; empty if the transport does not know them."""

    def iteration(self, iteration: int) -> list[ActionRecord]:
        """Return the records of one iteration."""
        return [record for record in self.records if record.iteration == iteration]


_MOST_HEADER = 1 << 12
"""Maximum number of characters of a header."""


class TraceHeader(NamedTuple):
    """First line of a trace file."""

    rank: int
    stage: int
    clock_offset_s: float


def read_trace_header(path: Path | str) -> TraceHeader:
    """Read the header of a file, and not the rest. Raises TraceError, and OSError if the file cannot be read."""
    with _opened(Path(path)) as file:
        return _header(Path(path), file.readline(_MOST_HEADER))


def _opened(path: Path) -> TextIO:
    """Open a regular file. Raises TraceError if it is none."""
    if is_no_file(path):
        raise TraceError(f"{path} is no file")
    return path.open(encoding="utf-8", errors="replace")


def _header(path: Path, line: str) -> TraceHeader:
    if not line.endswith("\n"):
        raise TraceError(f"{path} is empty: its rank failed before it wrote the header")
    try:
        header = _HEADER.decode(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line 1: expected a trace header, got {line[:80]!r}") from error
    if header.version != FILE_VERSION:
        raise TraceError(f"{path} has trace version {header.version!r}; this package reads version {FILE_VERSION}")
    return TraceHeader(header.rank, header.stage, header.clock_offset_s)


def read_trace(path: Path | str, damage: Callable[[str], object] | None = None) -> RankTrace:
    """Read one rank's file and the one renamed before it.

    An incomplete last line (the rank was killed) is left out. Other invalid lines raise TraceError or, if `damage` is
    given, are left out, and it is called with a description of each. Raises OSError if the file cannot be read.
    """
    path = Path(path)
    earlier = set_aside_path(path)
    if earlier.is_file():
        before, latest = _read_file(earlier, damage), _read_file(path, damage)
        records, arrivals = before.records + latest.records, before.arrivals + latest.arrivals
        return replace(latest, records=records, arrivals=arrivals)
    return _read_file(path, damage)


def _read_file(path: Path, damage: Callable[[str], object] | None) -> RankTrace:
    with _opened(path) as file:
        lines = file.read().split("\n")[:-1]
    rank, stage, file_offset_s = _header(path, lines[0] + "\n" if lines else "")
    records: list[ActionRecord] = []
    arrivals: list[ArrivalRecord] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            ran, arrived = _records(_ITERATION.decode(line), stage, file_offset_s)
        except (ValueError, RecursionError) as error:
            problem = f"{path}, line {number}: expected one iteration's records, got {line[:80]!r}"
            if damage is None:
                raise TraceError(problem) from error
            damage(problem)
            continue
        records += ran
        arrivals += arrived
    return RankTrace(rank=rank, stage=stage, records=tuple(records), arrivals=tuple(arrivals))


def _records(
    iteration: _WrittenIteration, stage: int, file_offset_s: float
) -> tuple[list[ActionRecord], list[ArrivalRecord]]:
    """Return the records and arrivals of one line."""
    number = iteration.iteration
    offset_s = file_offset_s if iteration.clock_offset_s is msgspec.UNSET else iteration.clock_offset_s
    records = [
        ActionRecord(number, stage, kind, chunk, micro_batch, waited_s + offset_s, start_s + offset_s, end_s + offset_s)
        for kind, chunk, micro_batch, waited_s, start_s, end_s in iteration.records
    ]
    arrivals = [
        ArrivalRecord(number, source, stage, kind, chunk, micro_batch, arrived_s + offset_s)
        for source, kind, chunk, micro_batch, arrived_s in iteration.arrivals
    ]
    return records, arrivals


def read_traces(directory: Path | str) -> list[RankTrace]:
    """Read every rank's file in a directory. Raises TraceError if there is none or one is damaged."""
    paths = sorted(Path(directory).glob(FILE_PATTERN))
    if not paths:
        raise TraceError(f"no {FILE_PATTERN} in {directory}: was the run started with --adaptra-trace-dir {directory}?")
    return sorted((read_trace(path) for path in paths), key=lambda trace: trace.rank)
