# SPDX-License-Identifier: Apache-2.0
"""Start and end a sidecar process, exchange typed messages with it, and pass its log lines and events to its rank.

The channel is a unix socket between the two processes. Each frame is a message and raw bytes (`along`). If the channel
ends, the other process has ended. This module must not import torch, since sidecar processes import it.
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
from adaptra_megatron.telemetry.events import Event, Stamp, StampedEvent, decode, encode
from adaptra_megatron.transport._ring import die_with_parent

_MOST_NBYTES = 1 << 26
_MOST_ALONG_NBYTES = 1 << 30
_HEAD = struct.Struct("<II")
"""Bytes of the message, and of the raw bytes after it."""


class ChannelEndedError(ConnectionError):
    """The other process has ended, or sent something invalid."""


class ChannelClosedError(ChannelEndedError):
    """The other process has closed its end."""


Received = TypeVar("Received", bound=TaggedMessage)


def packed(message: TaggedMessage, along: Sequence[bytes] = ()) -> bytes:
    """Return the frame of a message. `along`: raw bytes to append."""
    body = encoded(message)
    return b"".join((_HEAD.pack(len(body), sum(map(len, along))), body, *along))


def send(channel: socket.socket, message: TaggedMessage, along: Sequence[bytes] = ()) -> None:
    """Send a message and raw bytes. Raises ChannelEndedError if the other process has ended, or does not read them
    within the channel's timeout."""
    try:
        channel.sendall(packed(message, along))
    except OSError as cause:
        raise ChannelEndedError(f"does not listen: {cause}") from cause


class SidecarMessages(Generic[Received]):
    """Decoder of all messages of one channel in one direction."""

    def __init__(self, kinds: Any) -> None:
        """Set up. `kinds`: the type of the messages, or a union of types."""
        self._decode: Decoder[Received] = Decoder(kinds, _MOST_NBYTES)

    def receive(self, channel: socket.socket) -> Received:
        """Return the next message, on a blocking channel that carries no raw bytes. Raises ChannelEndedError, also if
        none comes within the timeout."""
        try:
            body_nbytes, _none = _sizes(_exactly(channel, _HEAD.size))
            return self._message(_exactly(channel, body_nbytes))
        except TimeoutError as cause:
            raise ChannelEndedError(f"did not answer within {channel.gettimeout():g} s") from cause
        except ChannelEndedError:
            raise
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    async def receive_async(self, channel: socket.socket) -> tuple[Received, bytes]:
        """Return the next message and its raw bytes, on a channel that does not block. Raises ChannelEndedError."""
        try:
            body_nbytes, along_nbytes = _sizes(await receive_exactly(channel, _HEAD.size))
            body = await receive_exactly(channel, body_nbytes)
            return self._message(body), await receive_exactly(channel, along_nbytes)
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    def _message(self, body: bytes) -> Received:
        try:
            return self._decode(body)
        except ValueError as cause:
            raise ChannelEndedError(f"sent an invalid message: {cause}") from cause


class Sidecar(ChildProcess):
    """A sidecar process that serves a listener of its rank, and the channel of messages to it."""

    def __init__(self, module: str, listener: socket.socket, begin: TaggedMessage, timeout_s: float) -> None:
        """Start the process (see ChildProcess). `begin`: its first message. `timeout_s`: of the channel."""
        super().__init__(module, socket.SOCK_STREAM)
        self.channel.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
            send_descriptor(self.channel, listener.fileno())
            send(self.channel, begin)

    def close(self) -> str:
        """End the process. Return how it ended."""
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
"""Descriptors besides those of its ranks: its own files, and connections before their handshake."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line for the log."""

    module: str
    level: int
    text: str


class Notes(logging.Handler):
    """Log lines and events that have not been sent to the rank yet."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the package's loggers for the rank, which logs it under its own prefix."""
        text = record.getMessage().removeprefix("adaptra: ")
        self._lines.append(Line(module=record.name, level=record.levelno, text=text))

    def log(self, event: Event) -> None:
        """Record an event."""
        self._events.append(encode(StampedEvent(stamp=_NO_STAMP, event=event)))

    def take_all(self) -> tuple[tuple[Line, ...], tuple[str, ...]]:
        """Return all kept lines and events, and drop them. Events are encoded as in an event log; their stamps are not
        used."""
        lines, events = tuple(self._lines), tuple(self._events)
        self._lines.clear()
        self._events.clear()
        return lines, events

    def collect(self, level: int) -> None:
        """Take in all lines of the package's loggers from now on, at `level` or above."""
        logger = logging.getLogger("adaptra_megatron")
        logger.setLevel(level)
        logger.addHandler(self)
        logger.propagate = False


def log_lines(lines: tuple[Line, ...], word: str = "") -> None:
    """Log lines of a sidecar process of this rank. `word`: prefix of each."""
    for line in lines:
        logger_of(line.module).log(line.level, "%s%s", word, line.text)


def log_events(events: tuple[str, ...], log: Callable[[Event], None]) -> None:
    """Pass the events of a sidecar process of this rank to its telemetry."""
    for event in events:
        log(decode(event).event)


def allow_connections(count: int, what: str) -> None:
    """Raise this process's limit of open files to the maximum; warn if `count` connections exceed it. `what`: the
    process, as text."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < count + _OTHER_FILES:
        logger_of(__name__).warning(
            "%d ranks connect to this %s, which may open %d files: raise the hard limit (ulimit -Hn)",
            *(count, what, most),
        )


def serve(arguments: list[str], work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a sidecar process until its channel ends, with its rank.

    `arguments`: descriptor of its channel, and the rank's process id. `work(channel, listener)`: called with the
    non-blocking channel and the rank's listener, which the rank sends first.
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
