# SPDX-License-Identifier: Apache-2.0
"""What a leading rank and its planner process say to each other, over a unix socket that no other process holds.

Each message is its kind's name and itself, and bytes where reports or a decision go along. Before the first, the
planner process is given the socket on which it listens to the ranks that follow. The end of the channel is the end of
the other process. No torch here: the planner process imports this.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, get_args

import msgspec

from adaptra_megatron.authentication.socket_io import receive_exactly
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.control.order.plans import Layout
from adaptra_megatron.control.path_decider import PathPolicy
from adaptra_megatron.control.routes.route_decider import RoutePolicy
from adaptra_megatron.control.wire_format import Decoder, encoded
from adaptra_megatron.telemetry.tracing.trace_requests import Iterations

_MOST_NBYTES = 1 << 26
_MOST_MEASURED_NBYTES = 1 << 30
_HEAD = struct.Struct("<II")
"""Bytes of the message, and of what goes along."""


class ChannelEndedError(ConnectionError):
    """The other process is gone, or says what cannot be."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """To the planner process, first: who it decides for. The options are AdaptraConfig's."""

    name: ClassVar[str] = "begin"
    secret: str = field(repr=False)
    """Hexadecimal."""
    place: str
    """Place of the decisions in the job's store."""
    reporters: tuple[int, ...]
    """The ranks that are decided for, the leading one among them, which is the first."""
    layout: Layout
    measures_memory: bool
    policy: str
    max_in_flight: float | None
    plan_csv: str | None
    costs_json: str | None
    paths: PathPolicy | None
    log_level: int
    waits_s: float = 15.0
    """Between two words of a planner process that waits for reports."""
    routes: RoutePolicy | None = None
    running: Decision = Decision(0)
    """Decision in force, with the order of its plan if that was planned."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """To the planner process: iterations to decide on, with what the leading rank itself measured in them."""

    name: ClassVar[str] = "measured"
    iterations: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Size of each iteration's report, in the bytes that go along."""
    number: int
    """Number of the plan that runs."""
    requests: tuple[Iterations, ...]
    """For traces."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """To the planner process: a decision to pass on to all ranks that follow, which goes along."""

    name: ClassVar[str] = "published"
    iteration: int


@dataclass(frozen=True, kw_only=True)
class Waits:
    """From the planner process, while it waits for reports, every `Begin.waits_s`: it is alive."""

    name: ClassVar[str] = "waits"
    iteration: int
    missing: tuple[int, ...]
    """Ranks whose reports of this iteration have not come."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line to log."""

    module: str
    level: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Decided:
    """From the planner process: what follows from one or several iterations, once all ranks have reported them."""

    name: ClassVar[str] = "decided"
    until: int
    """The latest of them."""
    decision: Decision | None
    """None where none could be made."""
    failure: str
    """Why not."""
    lines: tuple[Line, ...]
    events: tuple[str, ...]
    """Lines of an event log; their stamps are not used."""
    costs: str | None
    """The latest estimate, as the JSON text of `costs_to_json`."""


Message = Begin | Measured | Published | Waits | Decided
_ANY = Decoder(tuple[str, msgspec.Raw], _MOST_NBYTES)
_DECODERS: dict[str, Decoder[Message]] = {kind.name: Decoder(kind, _MOST_NBYTES) for kind in get_args(Message)}


def packed(message: Message, along: Sequence[bytes] = ()) -> bytes:
    """A message as it travels, with the bytes that go along."""
    body = encoded((message.name, message))
    return b"".join((_HEAD.pack(len(body), sum(map(len, along))), body, *along))


def send(channel: socket.socket, message: Message, along: Sequence[bytes] = ()) -> None:
    """Raises ChannelEndedError if the other process is gone, or does not take it within the channel's timeout."""
    try:
        channel.sendall(packed(message, along))
    except OSError as cause:
        raise ChannelEndedError(f"does not listen: {cause}") from cause


def receive(channel: socket.socket) -> Message:
    """The next message, without what goes along. Raises ChannelEndedError, also when none comes within the timeout."""
    try:
        body_nbytes, _none = _sizes(_exactly(channel, _HEAD.size))
        return _message(_exactly(channel, body_nbytes))
    except TimeoutError as cause:
        raise ChannelEndedError(f"did not answer within {channel.gettimeout():g} s") from cause
    except OSError as cause:
        raise ChannelEndedError(str(cause)) from cause


async def hear(channel: socket.socket) -> tuple[Message, bytes]:
    """The next message on a channel that does not block, and what goes along. Raises ChannelEndedError."""
    try:
        body_nbytes, along_nbytes = _sizes(await receive_exactly(channel, _HEAD.size))
        body = await receive_exactly(channel, body_nbytes)
        return _message(body), await receive_exactly(channel, along_nbytes)
    except OSError as cause:
        raise ChannelEndedError(str(cause)) from cause


def _sizes(head: bytes) -> tuple[int, int]:
    body_nbytes, along_nbytes = _HEAD.unpack(head)
    if body_nbytes > _MOST_NBYTES or along_nbytes > _MOST_MEASURED_NBYTES:
        raise ChannelEndedError(f"announces {body_nbytes} and {along_nbytes} bytes")
    return body_nbytes, along_nbytes


def _message(body: bytes) -> Message:
    try:
        name, message = _ANY(body)
        return _DECODERS[name](message)
    except (ValueError, KeyError) as cause:
        raise ChannelEndedError(f"sent an invalid message: {cause}") from cause


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    rest = memoryview(found)
    while rest:
        received = channel.recv_into(rest)
        if not received:
            raise ChannelEndedError("ended")
        rest = rest[received:]
    return bytes(found)
