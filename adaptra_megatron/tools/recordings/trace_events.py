# SPDX-License-Identifier: Apache-2.0
"""Read the events of a Chrome trace in JSON in blocks: 200 MB take no more memory than 20 MB.

Files may be compressed; known other formats are refused by name. A trace is an object with a list of `traceEvents`,
such a list alone, or one event per line. The list's last bracket may be missing, as when a process was killed. Blocks
that end between two events are decoded by msgspec; if that fails (NaN, an event that is no object), events are decoded
one by one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from adaptra_megatron.telemetry.background_writer import is_no_file
from adaptra_megatron.tools.recordings.recording import NoTraceError, RecordingError

MOST_NBYTES = 16 << 30
"""Maximum number of bytes of one file, after decompression."""
MOST_RATIO, UNSUSPICIOUS_NBYTES = 250, 64 << 20
"""Largest ratio of decompression above that size; traces usually have 10 to 50."""
HEAD_NBYTES = 4096
PARQUET = b"PAR1"
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions that a damaged compressed file raises."""

INSTEAD = (
    "record forwards and backwards instead: record_function around each of them under torch.profiler, or a trace of "
    "Megatron's or MegaScan's with iteration, pp_rank and microbatch in args (docs/analyze.md)"
)
_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it by zstd -d",
    b"PK\x03\x04": "a zip archive: unpack it and name the trace in it",
    b"SQLite format 3": f"an SQLite database, such as Nsight Systems exports, whose ranges name no stage: {INSTEAD}",
    b"NVIDIA": f"a report of an NVIDIA profiler, which its own tools read: {INSTEAD}",
    b"\x80": f"a pickle, as NCCL's flight recorder and memory snapshots leave, which is not opened: {INSTEAD}",
    b"\x89HDF": f"an HDF5 file: {INSTEAD}",
    b"\x0a": "a trace in Perfetto's own format: give the JSON, which `adaptra trace -o trace.json` writes",
    b"<": "a page of HTML or XML: save the trace itself",
}
_DOCUMENTS = (
    (("entries", "pg_config"), "a dump of the NCCL flight recorder, which has collectives and sends alone"),
    (("entries", "pg_status"), "a dump of the NCCL flight recorder, which has collectives and sends alone"),
    (("schema", "nodes"), "an execution trace (Chakra), which has operators and no times of micro-batches"),
    (("nodes", "start_ts"), "an execution trace (Chakra), which has operators and no times of micro-batches"),
    (("NvtxEvent",), "an export of Nsight Systems"),
    (("segments", "device_traces"), "a memory snapshot"),
    (("relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("gpu_relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("section_relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("scores",), "a report of scores"),
)
_COSTS = ("stages", "micro_batches")


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed. Raises RecordingError if it is damaged, OSError if it cannot be
    read."""
    with opened(path) as file:
        try:
            return file.read(HEAD_NBYTES)
        except DAMAGED as error:
            raise _damaged(path, error) from error


def opened(path: Path) -> IO[bytes]:
    """Open a file, decompressing it if need be. Raises RecordingError for anything but a regular file, because it is
    read more than once."""
    if is_no_file(path):
        raise RecordingError(f"{path} is no file")
    with path.open("rb") as file:
        head = file.read(8)
    for magic, way in _COMPRESSED.items():
        if head.startswith(magic):
            return cast("IO[bytes]", way(path, "rb"))
    return path.open("rb", buffering=io.DEFAULT_BUFFER_SIZE)


def _damaged(path: Path, error: BaseException) -> RecordingError:
    return RecordingError(f"{path} cannot be decompressed: {error or 'it is cut short'}; copy it again")


class Bounded:
    """Reader of a file in blocks. Raises RecordingError if the file is damaged or too large."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._nbytes = 0

    def read(self, nbytes: int) -> bytes:
        """Return the next block; empty at the end."""
        try:
            block = self._file.read(nbytes)
        except DAMAGED as error:
            raise _damaged(self._path, error) from error
        self._nbytes += len(block)
        if self._nbytes > max(UNSUSPICIOUS_NBYTES, MOST_RATIO * self._path.stat().st_size):
            raise RecordingError(
                f"{self._path} is more than {MOST_RATIO} times as large when it is decompressed, as no trace is"
            )
        if self._nbytes > MOST_NBYTES:
            raise RecordingError(f"{self._path} holds more than {MOST_NBYTES >> 30} GiB: record fewer steps")
        return block


def refuse_other_formats(path: Path, head: bytes) -> None:
    """Refuse a file of another format: raise RecordingError, with the format's name if known."""
    if not head.strip():
        raise RecordingError(f"{path} is empty")
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise RecordingError(f"{path} is {what}")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        raise RecordingError(f"{path} is no trace that can be read: neither JSON nor Parquet; {INSTEAD}")


def is_other_format(head: bytes) -> bool:
    """Return whether a file with this head is Parquet, or another known binary format."""
    return any(head.startswith(magic) for magic in (PARQUET, *_OTHERS) if magic not in (b"\x0a", b"<"))


def is_other_document(document: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a dump of a known tool."""
    return any(all(key in document for key in keys) for keys, _ in _DOCUMENTS)


def named_document(document: Mapping[str, Any]) -> str:
    """Describe a JSON object without traceEvents, and what to record instead."""
    for keys, what in _DOCUMENTS:
        if all(key in document for key in keys):
            return f"is {what}: {INSTEAD}"
    if all(key in document for key in _COSTS):
        return "is a file of costs, which `adaptra plan` and `adaptra simulate` take"
    return f"has no list of traceEvents: {INSTEAD}"


_BLOCK_NBYTES = 8 << 20
_TAIL_NBYTES = 1 << 16
"""Bytes before a block's end in which the end of an event is searched."""
_MOST_NBYTES = 256 << 20
"""Maximum number of bytes of a single event, and of the rest outside the list of events."""
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = re.compile(r"[\s,]*")


class Event(msgspec.Struct, gc=False):
    """One event; None for missing fields. Values may be anything: `naming` interprets them."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Any = None


_FIELDS = Event.__struct_fields__
_EVENTS = msgspec.json.Decoder(list[Event])


class TraceEvents:
    """The events of the file at `path`, for one pass; after it, `rest` has the object's other entries.

    The pass raises RecordingError if it is no such trace, OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rest: dict[str, Any] = {}
        self.odd = 0
        """Number of entries of the list that are no objects."""
        self.unfinished = False
        """Whether the last bracket is missing."""
        self._lines = False
        """Whether there is one event per line, without a list."""
        self._text = ""
        self._at = 0
        self._block = b""

    def __iter__(self) -> Iterator[Event]:
        with opened(self._path) as file:
            self._file = Bounded(self._path, file)
            in_object = self._begin()
            yield from self._quickly()
            yield from self._slowly(in_object)

    def _begin(self) -> bool:
        """Read up to the first event; return whether the list is an entry of an object."""
        self._block = self._file.read(_BLOCK_NBYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        if self._block.startswith(b"["):
            self._block = self._block[1:]
            return False
        self._lines = _begins_with_event(self._block)
        if self._lines:
            return False
        while (found := _LIST.search(self._block)) is None:
            more = self._file.read(_BLOCK_NBYTES)
            if not more or len(self._block) > _MOST_NBYTES:
                raise self._without_list(more)
            self._block += more
        before = self._block[: found.start()].rstrip().rstrip(b",")
        self.rest |= self._decoded(before + b"}")
        self._block = self._block[found.end() :]
        return True

    def _without_list(self, more: bytes) -> RecordingError:
        try:
            document, _ = json.JSONDecoder().raw_decode(self._block.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            return RecordingError(f"{self._path} is no Chrome trace in JSON: {_why(error)}")
        known = isinstance(document, dict) and not more
        return NoTraceError(str(self._path), named_document(document) if known else "has no list of traceEvents")

    def _decoded(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"{self._path} is no Chrome trace in JSON: {_why(error)}") from error
        return found if isinstance(found, dict) else {}

    def _quickly(self) -> Iterator[Event]:
        """Yield the events of whole blocks, as long as these can be decoded."""
        while more := self._file.read(_BLOCK_NBYTES):
            self._block += more
            ends = list(_BETWEEN.finditer(self._block, max(0, len(self._block) - _TAIL_NBYTES)))
            if not ends:
                return
            try:
                found = _EVENTS.decode(b"[" + self._block[: ends[-1].start() + 1] + b"]")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return
            self._block = self._block[ends[-1].end() :]
            yield from found

    def _slowly(self, in_object: bool) -> Iterator[Event]:
        """Yield the rest event by event."""
        decode = json.JSONDecoder().raw_decode
        self._text, self._block = self._block.decode(errors="replace"), b""
        while (first := self._next()) != "]":
            if not first:
                self._end_without_bracket(in_object)
                return
            value = self._value(decode)
            if isinstance(value, dict):
                yield Event(*map(value.get, _FIELDS))
            else:
                self.odd += 1
        self._at += 1
        if in_object and self._next():
            rest = self._text[self._at :] + self._file.read(_MOST_NBYTES).decode(errors="replace")
            self.rest |= self._decoded(b"{" + rest.strip().encode())

    def _next(self) -> str:
        """Return the next character that is neither space nor comma; empty at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None, "a pattern of stars matches everywhere"
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        block = self._file.read(max(_BLOCK_NBYTES, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + block.decode(errors="replace"), 0
        return bool(block) and len(self._text) <= _MOST_NBYTES

    def _value(self, decode: Any) -> Any:
        while True:
            try:
                value, end = decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or not self._more():
                    raise RecordingError(
                        f"{self._path} is cut short or no JSON, in the event that begins with "
                        f"{self._text[self._at : self._at + 60]!r}: {_why(error)}; copy it again, or record it again"
                    ) from error
                continue
            self._at = end
            return value

    def _end_without_bracket(self, in_object: bool) -> None:
        if in_object:
            raise RecordingError(f"{self._path} is cut short: its list of traceEvents has no end; copy it again")
        self.unfinished = not self._lines


def _begins_with_event(text: bytes) -> bool:
    line = text.partition(b"\n")[0]
    if _LIST.search(line) is not None:  # a whole trace may be one line: it is not decoded for this
        return False
    try:
        first, _ = json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "ph" in first and "traceEvents" not in first


def _why(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
