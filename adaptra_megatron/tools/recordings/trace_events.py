# SPDX-License-Identifier: Apache-2.0
"""The events of a Chrome trace in JSON, one block at a time: a file of 200 MB takes no more memory than one of 20.

A trace is an object with a list of `traceEvents`, or such a list alone, whose last bracket may be missing, for a
process that was killed could not write it; or an event in each line, without a list. Blocks that end between two events
are decoded at once by msgspec; what it does not take, such as NaN or an event that is no object, is decoded event by
event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from adaptra_megatron.tools.recordings.contents import Bounded, named_document, opened
from adaptra_megatron.tools.recordings.recording import NoTraceError, RecordingError

_BLOCK_NBYTES = 8 << 20
_TAIL_NBYTES = 1 << 16
"""Within so many bytes of a block's end, an end of an event is looked for."""
_MOST_NBYTES = 256 << 20
"""Of a single event, and of what is not in the list of events."""
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = re.compile(r"[\s,]*")


class Event(msgspec.Struct, gc=False):
    """One event; None for what it does not have. Values may be anything: see `naming` for what they are read as."""

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
    """The events of the file at `path`, to be gone through once; then `rest` has the other entries of the object.

    Raises RecordingError, on the way, for what is no such trace, OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rest: dict[str, Any] = {}
        self.odd = 0
        """Entries of the list that are no objects."""
        self.unfinished = False
        """True if the last bracket is missing."""
        self._lines = False
        """True if there is no list, but an event in each line."""
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
        """Whole blocks, as long as there are more and they can be decoded."""
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
        """Event by event, to the end."""
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
        """The first character of what comes next; empty at the end of the file."""
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
