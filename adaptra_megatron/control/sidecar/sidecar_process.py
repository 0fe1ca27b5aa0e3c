# SPDX-License-Identifier: Apache-2.0
"""Start and end a sidecar process, exchange typed messages with it, and pass its log lines and events to its rank.

Exchange typed messages between a rank and its sidecar process, over a unix socket that no other process holds.
Each is a message, and bytes that go along, which are not looked at. The end of the
channel is the end of the other process. No torch here: sidecar processes import this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from adaptra_megatron.common.child_process import ChildProcess
from adaptra_megatron.common.handshake import receive_descriptor, receive_exactly, send_descriptor
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import Decoder, TaggedMessage, encoded
from adaptra_megatron.telemetry.events.events import Event, Stamp, StampedEvent, decode, encode
from adaptra_megatron.transport._ring import die_with_parent

_MOST_NBYTES = 1 << 26
_MOST_ALONG_NBYTES = 1 << 30
_HEAD = struct.Struct("<II")
"""Bytes of the message, and of what goes along."""


class ChannelEndedError(ConnectionError):
    """The other process is gone, or says what cannot be."""


class ChannelClosedError(ChannelEndedError):
    """The other process has closed its end."""


Said = TypeVar("Said", bound=TaggedMessage)


def packed(message: TaggedMessage, along: Sequence[bytes] = ()) -> bytes:
    """A message as it travels, with the bytes that go along."""
    body = encoded(message)
    return b"".join((_HEAD.pack(len(body), sum(map(len, along))), body, *along))


def send(channel: socket.socket, message: TaggedMessage, along: Sequence[bytes] = ()) -> None:
    """Raises ChannelEndedError if the other process is gone, or does not take it within the channel's timeout."""
    try:
        channel.sendall(packed(message, along))
    except OSError as cause:
        raise ChannelEndedError(f"does not listen: {cause}") from cause


class SidecarMessages(Generic[Said]):
    """All kinds of messages of one channel, for the side that takes them in."""

    def __init__(self, kinds: Any) -> None:
        """`kinds`: a union, or one kind."""
        self._decode: Decoder[Said] = Decoder(kinds, _MOST_NBYTES)

    def receive(self, channel: socket.socket) -> Said:
        """The next message, without what goes along. Raises ChannelEndedError, also when none comes within the
        timeout."""
        try:
            body_nbytes, _none = _sizes(_exactly(channel, _HEAD.size))
            return self._message(_exactly(channel, body_nbytes))
        except TimeoutError as cause:
            raise ChannelEndedError(f"did not answer within {channel.gettimeout():g} s") from cause
        except ChannelEndedError:
            raise
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    async def receive_async(self, channel: socket.socket) -> tuple[Said, bytes]:
        """The next message on a channel that does not block, and what goes along. Raises ChannelEndedError."""
        try:
            body_nbytes, along_nbytes = _sizes(await receive_exactly(channel, _HEAD.size))
            body = await receive_exactly(channel, body_nbytes)
            return self._message(body), await receive_exactly(channel, along_nbytes)
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    def _message(self, body: bytes) -> Said:
        try:
            return self._decode(body)
        except ValueError as cause:
            raise ChannelEndedError(f"sent an invalid message: {cause}") from cause


class Sidecar(ChildProcess):
    """A sidecar process that serves a listener of its rank, and the channel of messages to it."""

    def __init__(self, module: str, listener: socket.socket, begin: TaggedMessage, timeout_s: float) -> None:
        """Starts it, as ChildProcess says, with `begin` as its first message. `timeout_s`: of the channel."""
        super().__init__(module, socket.SOCK_STREAM)
        self.channel.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
            send_descriptor(self.channel, listener.fileno())
            send(self.channel, begin)

    def close(self) -> str:
        """End it. Returns how it ended."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.shutdown(socket.SHUT_RDWR)
        return self.end(0.5)


def _sizes(head: bytes) -> tuple[int, int]:
    sizes: tuple[int, int] = _HEAD.unpack(head)
    if sizes[0] > _MOST_NBYTES or sizes[1] > _MOST_ALONG_NBYTES:
        raise ChannelEndedError(f"announces {sizes[0]} and {sizes[1]} bytes")
    return sizes


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    rest = memoryview(found)
    while rest:
        received = channel.recv_into(rest)
        if not received:
            raise ChannelClosedError("ended")
        rest = rest[received:]
    return bytes(found)


_NO_STAMP = Stamp(run="", rank=0, sequence=0, iteration=0, wall_s=0.0, monotonic_s=0.0)
_OTHER_FILES = 32
"""Descriptors of the process itself, and of connections that have not proven themselves."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line to log."""

    module: str
    level: int
    text: str


class Notes(logging.Handler):
    """Lines of the log and events that have not been handed to the rank yet."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the package's loggers for the rank, which logs it under its own prefix."""
        text = record.getMessage().removeprefix("adaptra: ")
        self._lines.append(Line(module=record.name, level=record.levelno, text=text))

    def log(self, event: Event) -> None:
        """See RunTelemetry."""
        self._events.append(encode(StampedEvent(stamp=_NO_STAMP, event=event)))

    def take_all(self) -> tuple[tuple[Line, ...], tuple[str, ...]]:
        """All lines, and all events as lines of an event log whose stamps are not used; they are handed out once."""
        lines, events = tuple(self._lines), tuple(self._events)
        self._lines.clear()
        self._events.clear()
        return lines, events

    def collect(self, level: int) -> None:
        """Take in all that the package's loggers have to say from now on, from `level` on."""
        logger = logging.getLogger("adaptra_megatron")
        logger.setLevel(level)
        logger.addHandler(self)
        logger.propagate = False


def log_lines(lines: tuple[Line, ...], word: str = "") -> None:
    """Log lines of a sidecar process of this rank. `word`: before each."""
    for line in lines:
        logger_of(line.module).log(line.level, "%s%s", word, line.text)


def log_events(events: tuple[str, ...], log: Callable[[Event], None]) -> None:
    """Pass the events of a sidecar process of this rank to its telemetry."""
    for event in events:
        log(decode(event).event)


def allow_connections(count: int, what: str) -> None:
    """Raise this process's limit of open files as far as it goes; warn where `count` connections exceed it. `what`:
    the process, in words."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < count + _OTHER_FILES:
        logger_of(__name__).warning(
            "%d ranks connect to this %s, which may open %d files: raise the hard limit (ulimit -Hn)",
            *(count, what, most),
        )


def serve(arguments: list[str], work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a sidecar process until its channel ends; it ends with the rank.

    `arguments`: the descriptor of its channel, and the rank's process id. `work(channel, listener)`: the channel does
    not block; the listener is the rank's, which was sent first.
    """
    descriptor, parent = map(int, arguments)
    die_with_parent(parent)
    try:
        asyncio.run(_served(socket.socket(fileno=descriptor), work))
    except OSError:  # the channel has ended
        os._exit(0)
    except Exception:
        traceback.print_exc()
        os._exit(1)


async def _served(channel: socket.socket, work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    channel.setblocking(False)
    await work(channel, socket.socket(fileno=await receive_descriptor(channel)))
