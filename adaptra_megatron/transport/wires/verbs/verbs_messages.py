# SPDX-License-Identifier: Apache-2.0
"""Define the messages of two delegates about their queue pairs, over their authenticated TCP connection.

Format: a length of four bytes (little-endian) and one JSON object. Sizes, names and types are checked before use.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, packed, unpacked

LARGEST_NBYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class VerbsEndpoint(NamedTuple):
    """One end of a queue pair: the data that the other end needs to connect."""

    gid: str
    lid: Natural
    """Local identifier; 0 over Ethernet."""
    number: Natural
    packet_sequence: Natural
    mtu: Natural
    """libibverbs' code: 1 is 256 bytes, 5 is 4096."""
    address: Natural
    """Address of the slots that the peer writes to."""
    key: Natural
    """Remote key for writing there through this RNIC."""


class Hello(TaggedMessage, tag="hello", frozen=True, kw_only=True):
    """First message of both ends: number of rails, slots and slot size must match."""

    rails: Natural
    slots: Natural
    slot_nbytes: Natural


class Unable(TaggedMessage, tag="unable", frozen=True, kw_only=True):
    """Instead of Hello: this end cannot use verbs."""

    cause: str


class Grant(TaggedMessage, tag="grant", frozen=True, kw_only=True):
    """Slots for all chunks below `chunks` are granted. Sent if no rail can carry the grant, and after one has
    failed.
    """

    chunks: Natural


class Raise(TaggedMessage, tag="raise", frozen=True, kw_only=True):
    """From the connecting side: this end of the rail is ready for a connection."""

    rail: Natural
    attempt: Natural
    endpoint: VerbsEndpoint


class Raised(TaggedMessage, tag="raised", frozen=True, kw_only=True):
    """Answer to Raise: the other end is connected."""

    rail: Natural
    attempt: Natural
    endpoint: VerbsEndpoint


class Ready(TaggedMessage, tag="ready", frozen=True, kw_only=True):
    """From the connecting side: a probe was acknowledged."""

    rail: Natural
    attempt: Natural


class Fenced(TaggedMessage, tag="fenced", frozen=True, kw_only=True):
    """Nothing can arrive over this end of the rail any more; names all chunks that have arrived, over any rail."""

    rail: Natural
    attempt: Natural
    below: Natural
    beyond: list[Natural]
    cause: str


RailMessage = Raise | Raised | Ready | Fenced
VerbsMessage = Hello | Unable | Grant | RailMessage


def encode(message: VerbsMessage) -> bytes:
    body = packed(message)
    return _LENGTH.pack(len(body)) + body


class VerbsDecoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[VerbsMessage]:
        """Return the messages that are complete now. Raises ValueError for an invalid one."""
        self._unread += data
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._unread)
            # Before the rest arrives: a wrong length would otherwise let a peer fill this process's memory.
            if nbytes > LARGEST_NBYTES:
                raise ValueError(f"a message of {nbytes} bytes exceeds the limit of {LARGEST_NBYTES}")
            end = _LENGTH.size + nbytes
            if len(self._unread) < end:
                break
            messages.append(unpacked(bytes(self._unread[_LENGTH.size : end]), VerbsMessage, LARGEST_NBYTES))
            del self._unread[:end]
        return messages
