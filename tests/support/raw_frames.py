# SPDX-License-Identifier: Apache-2.0
"""Frames as bytes, put into a ring without any check: what a peer that means harm, or has a bug, may send."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.transport._ring import DATA_TYPES, FRAME_HEADER_NBYTES, Ring

HEADER = struct.Struct("<IBBBBQqIIQQQ8QQ")
"""FrameHeader of csrc/ring/frame.hpp."""
assert HEADER.size == FRAME_HEADER_NBYTES
MAGIC = 0x46504441
DATA, ACK, BYE, VOID = 1, 2, 3, 4
NOTE = 2
"""The last direction."""
MOST_DIMENSIONS = 8


@dataclass(kw_only=True)
class Frame:
    """A header's fields in their order, and its payload. The defaults are a part of a message of uint8 [total]."""

    sequence: int
    total_nbytes: int = 0
    offset: int = 0
    payload: bytes = b""
    nbytes: int | None = None
    """What the header says of the payload's size; None: the truth."""
    kind: int = DATA
    direction: int = 0
    dtype: int = DATA_TYPES["uint8"]
    shape: Sequence[int] | None = None
    """None: [total_nbytes]."""
    iteration: int = 0
    chunk: int = 0
    micro_batch: int = 0
    magic: int = MAGIC
    reserved: int = 0

    @property
    def header(self) -> bytes:
        shape = [self.total_nbytes] if self.shape is None else list(self.shape)
        nbytes = len(self.payload) if self.nbytes is None else self.nbytes
        return HEADER.pack(
            *(self.magic, self.kind, self.direction, self.dtype, len(shape)),
            *(self.sequence, self.iteration, self.chunk, self.micro_batch),
            *(self.total_nbytes, self.offset, nbytes),
            *(*shape, *[0] * (MOST_DIMENSIONS - len(shape))),
            self.reserved,
        )


def cut(sequence: int, content: bytes, slot_nbytes: int, **fields: int) -> list[Frame]:
    """The frames in which a sender of ours sends a message."""
    starts = range(0, max(1, len(content)), slot_nbytes)
    parts = [(start, content[start : start + slot_nbytes]) for start in starts]
    return [
        Frame(sequence=sequence, total_nbytes=len(content), offset=start, payload=part, **fields)
        for start, part in parts
    ]


def put(ring: Ring, header: bytes, payload: bytes = b"") -> None:
    """Publish a slot with these bytes. Raises TimeoutError unless the ring has room, or if it is closed."""
    index = ring.claim_slot(time.monotonic())
    if index is None:
        raise TimeoutError("the ring is full, or closed")
    for offset, data in zip(ring.slot_offsets(index), (header, payload), strict=True):
        ctypes.memmove(ring.slots_address + offset, data, len(data))
    ring.commit_slot(index)


def put_frame(ring: Ring, frame: Frame) -> None:
    """Publish a slot with this frame."""
    put(ring, frame.header, frame.payload)
