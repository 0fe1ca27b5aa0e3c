# SPDX-License-Identifier: Apache-2.0
"""What an Inbox of csrc/ring has to make of each frame: slow and obvious, and written from docs and headers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from support.raw_frames import ACK, BYE, DATA, HEADER, MAGIC, MOST_DIMENSIONS, NOTE, VOID

from adaptra_megatron.transport._ring import DATA_TYPES, Event

REFUSED = "refused"
_ITEM_NBYTES = {
    **dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16", "uint16"), 2),
    **dict.fromkeys(("int32", "float32", "uint32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    "complex128": 16,
}
ITEM_NBYTES = {code: _ITEM_NBYTES[name] for name, code in DATA_TYPES.items()}


class Header(NamedTuple):
    """A header's fields."""

    magic: int
    kind: int
    direction: int
    dtype: int
    dimensions: int
    sequence: int
    iteration: int
    chunk: int
    micro_batch: int
    total_nbytes: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    reserved: int

    @classmethod
    def of(cls, raw: bytes) -> Header:
        """Reads the 128 bytes of a header."""
        *fields, reserved = HEADER.unpack(raw)
        return cls(*fields[:12], tuple(fields[12:]), reserved)

    def is_possible(self, slot_nbytes: int, max_message_nbytes: int) -> bool:
        """Return whether a sender writes such a frame."""
        if self.magic != MAGIC or self.reserved != 0 or self.kind not in (DATA, ACK, BYE, VOID):
            return False
        if self.kind != DATA:
            return self.nbytes == 0
        if self.direction > NOTE or self.iteration < 0 or self.dtype not in ITEM_NBYTES:
            return False
        if self.dimensions > MOST_DIMENSIONS or self.total_nbytes > max_message_nbytes:
            return False
        described = [ITEM_NBYTES[self.dtype], *self.shape[: self.dimensions]]
        if math.prod(described) != self.total_nbytes or not _fits_in_order(described):
            return False
        cut = range(0, max(1, self.total_nbytes), slot_nbytes)
        return self.offset in cut and self.nbytes == min(slot_nbytes, self.total_nbytes - self.offset)

    def describes_the_message_of(self, other: Header) -> bool:
        """Return whether two frames are parts of one message."""
        parts = {"kind": 0, "offset": 0, "nbytes": 0}
        return self._replace(**parts) == other._replace(**parts)


def _fits_in_order(factors: list[int]) -> bool:
    """Return whether no product on the way exceeds 64 bits."""
    product = 1
    for factor in factors:
        product *= factor
        if product >= 1 << 64:
            return False
    return True


@dataclass
class _Partial:
    first: Header
    slot_nbytes: int
    parts: dict[int, bytes] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What a receiver gets."""

    kind: str
    sequence: int
    header: Header | None = None
    content: bytes = b""


class ReferenceInbox:
    """One sender's messages, over any number of rings."""

    def __init__(self, max_message_nbytes: int, window_nbytes: int) -> None:
        self._max_message_nbytes, self._window_nbytes = max_message_nbytes, window_nbytes
        self._partials: dict[int, _Partial] = {}
        self._complete: set[int] = set()

    def take(self, raw: bytes, payload: bytes, slot_nbytes: int) -> Outcome | str | None:
        """What comes of a frame: an outcome, REFUSED, or nothing yet. `payload`: at least what the header claims."""
        header = Header.of(raw)
        if not header.is_possible(slot_nbytes, self._max_message_nbytes):
            return REFUSED
        if header.kind != DATA:
            names = {ACK: "ACK", BYE: "BYE"}
            return Outcome(names[header.kind], header.sequence) if header.kind in names else None
        if header.sequence in self._complete:
            return Outcome("REPEATED", header.sequence) if header.offset == 0 else None
        partial = self._partials.get(header.sequence)
        if partial is None:
            if header.total_nbytes > slot_nbytes and not self._has_room(header):
                return REFUSED
            partial = self._partials[header.sequence] = _Partial(header, slot_nbytes)
        elif partial.slot_nbytes != slot_nbytes or not header.describes_the_message_of(partial.first):
            return REFUSED
        partial.parts.setdefault(header.offset, payload[: header.nbytes])
        if sum(map(len, partial.parts.values())) < header.total_nbytes:
            return None
        del self._partials[header.sequence]
        self._complete.add(header.sequence)
        content = b"".join(part for _offset, part in sorted(partial.parts.items()))
        return Outcome("MESSAGE", header.sequence, partial.first, content)

    def _has_room(self, header: Header) -> bool:
        alike = [
            partial.first.total_nbytes
            for partial in self._partials.values()
            if (partial.first.direction == NOTE) == (header.direction == NOTE)
        ]
        under_way = [*alike, header.total_nbytes]
        return sum(under_way) - max(under_way) < self._window_nbytes


def received(event: Event) -> Outcome:
    """An event of the real one, to be compared."""
    kind = event.kind.name
    if kind != "MESSAGE":
        return Outcome(kind, event.sequence)
    content = bytes(event.payload)
    shape = tuple(event.shape)
    header = Header(
        *(MAGIC, DATA, event.direction, event.dtype, len(shape), event.sequence),
        *(event.iteration, event.chunk, event.micro_batch, len(content), 0, 0),
        (*shape, *[0] * (MOST_DIMENSIONS - len(shape))),
        0,
    )
    return Outcome(kind, event.sequence, header, content)


def same(ours: Outcome | str, expected: Outcome | str) -> bool:
    """Return whether the real one did as the reference does."""
    if isinstance(ours, str) or isinstance(expected, str) or ours.header is None or expected.header is None:
        return ours == expected
    used = expected.header.shape[: expected.header.dimensions]
    unused = (0,) * (MOST_DIMENSIONS - len(used))  # of what lies beyond its dimensions, an event says nothing
    shaped = expected.header._replace(shape=(*used, *unused))
    alike = ours[:2] == expected[:2] and ours.content == expected.content
    return alike and ours.header.describes_the_message_of(shaped)
