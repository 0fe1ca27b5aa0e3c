# SPDX-License-Identifier: Apache-2.0
"""What two delegates say to each other about their queue pairs, over their proven TCP connection.

A length of four bytes (little-endian) and one JSON object. Sizes, names and types are checked before anything is used.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from adaptra_megatron.transport.tagged_json import kinds_of, packed

LARGEST_NBYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class Endpoint(NamedTuple):
    """One end of a queue pair, for the other to connect to."""

    gid: str
    lid: int
    """0 over Ethernet."""
    number: int
    packet_sequence: int
    mtu: int
    """As libibverbs counts: 1 is 256 bytes, 5 is 4096."""
    address: int
    """Of the slots that the peer writes into."""
    key: int
    """What the peer needs to write there through this RNIC."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First, from both: rings and rails must match."""

    name: ClassVar[str] = "hello"
    rails: int
    slots: int
    slot_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Unable:
    """Instead: this end has no verbs."""

    name: ClassVar[str] = "unable"
    cause: str


@dataclass(frozen=True, kw_only=True)
class Grant:
    """There are slots for all chunks below `chunks`. For when no rail can carry it, and after one has failed."""

    name: ClassVar[str] = "grant"
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Raise:
    """From the side that connects: this end of the rail is ready for the other to connect to it."""

    name: ClassVar[str] = "raise"
    rail: int
    attempt: int
    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The answer: the other end is connected."""

    name: ClassVar[str] = "raised"
    rail: int
    attempt: int
    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From the side that connects: a probe went through."""

    name: ClassVar[str] = "ready"
    rail: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """Nothing can arrive over this end of the rail any more; what had arrived, over any rail, is named."""

    name: ClassVar[str] = "fenced"
    rail: int
    attempt: int
    below: int
    beyond: list[int]
    cause: str


RailMessage = Raise | Raised | Ready | Fenced
VerbsMessage = Hello | Unable | Grant | RailMessage
_KINDS: dict[str, type[VerbsMessage]] = kinds_of(VerbsMessage)


def encode(message: VerbsMessage) -> bytes:
    body = packed(message)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[VerbsMessage]:
        """The messages that are complete now. Raises ValueError for anything else than a message."""
        self._unread += data
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._unread)
            if nbytes > LARGEST_NBYTES:
                raise ValueError(f"a message of {nbytes} bytes exceeds the limit of {LARGEST_NBYTES}")
            end = _LENGTH.size + nbytes
            if len(self._unread) < end:
                break
            messages.append(_parse(bytes(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return messages


def _parse(body: bytes) -> VerbsMessage:
    try:
        parsed = json.loads(body)
    except RecursionError as cause:
        raise ValueError("a message is nested too deep") from cause
    name = parsed.pop("is", None) if isinstance(parsed, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError("a message is of no known kind")
    kind = _KINDS[name]
    if parsed.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"a message {kind.name!r} has the fields {sorted(parsed)}")
    return kind(**{name: _checked(name, value) for name, value in parsed.items()})


def _checked(name: str, value: Any) -> Any:
    if name == "cause":
        good = isinstance(value, str)
    elif name == "beyond":
        good = isinstance(value, list) and all(map(_is_count, value))
    elif name == "endpoint":
        good = isinstance(value, list) and len(value) == len(Endpoint._fields)
        good = good and isinstance(value[0], str) and all(map(_is_count, value[1:]))
        value = Endpoint(*value) if good else value
    else:
        good = _is_count(value)
    if not good:
        raise ValueError(f"a message has an impossible {name!r}")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64
