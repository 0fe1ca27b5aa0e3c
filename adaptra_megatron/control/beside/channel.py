# SPDX-License-Identifier: Apache-2.0
"""Exchange typed messages between a rank and its sidecar process, over a unix socket that no other process holds.

Each message is its kind's name and itself, and bytes that go along, which are not looked at. The end of the channel is
the end of the other process. No torch here: sidecar processes import this.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from adaptra_megatron.authentication.socket_io import receive_exactly, send_descriptor
from adaptra_megatron.child_process import ChildProcess
from adaptra_megatron.control.wire_format import Decoder, encoded

_MOST_NBYTES = 1 << 26
_MOST_ALONG_NBYTES = 1 << 30
_HEAD = struct.Struct("<II")
"""Bytes of the message, and of what goes along."""


class ChannelEndedError(ConnectionError):
    """The other process is gone, or says what cannot be."""


class ChannelClosedError(ChannelEndedError):
    """The other process has closed its end."""


class Message(Protocol):
    """A frozen dataclass with a name."""

    name: ClassVar[str]


Said = TypeVar("Said", bound=Message)


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


class Messages(Generic[Said]):
    """All kinds of messages of one channel, for the side that takes them in."""

    _ANY: Decoder[tuple[str, msgspec.Raw]] = Decoder(tuple[str, msgspec.Raw], _MOST_NBYTES)

    def __init__(self, *kinds: type[Said]) -> None:
        self._decoders: dict[str, Decoder[Said]] = {kind.name: Decoder(kind, _MOST_NBYTES) for kind in kinds}

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

    async def hear(self, channel: socket.socket) -> tuple[Said, bytes]:
        """The next message on a channel that does not block, and what goes along. Raises ChannelEndedError."""
        try:
            body_nbytes, along_nbytes = _sizes(await receive_exactly(channel, _HEAD.size))
            body = await receive_exactly(channel, body_nbytes)
            return self._message(body), await receive_exactly(channel, along_nbytes)
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    def _message(self, body: bytes) -> Said:
        try:
            name, message = self._ANY(body)
            return self._decoders[name](message)
        except (ValueError, KeyError) as cause:
            raise ChannelEndedError(f"sent an invalid message: {cause}") from cause


class Sidecar(ChildProcess):
    """A process beside a rank that serves a listener of the rank's, and the channel of messages to it."""

    def __init__(self, module: str, listener: socket.socket, begin: Message, timeout_s: float) -> None:
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
