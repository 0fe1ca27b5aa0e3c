# SPDX-License-Identifier: Apache-2.0
"""Control messages between a training process and its delegate, over a unix socket that no other process holds.

1. One packet is one JSON object; descriptors of rings and sockets travel with it (SCM_RIGHTS).
2. StartDelegate comes first. A closed socket means that the other process has ended: the delegate then exits, and the
   training process starts another delegate.
3. Each OpenLink has a session number, which Up and Down repeat. Messages of an earlier session are ignored.
4. A session that the training process did not end itself (CloseLink, another OpenLink, Stop) ends in one Down.
5. Fields are typed. An invalid packet counts as the end of the other process (ControlEndedError).

This module does not import torch, because the delegate imports it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, packed, unpacked

_LARGEST_NBYTES = 1 << 16
_MOST_DESCRIPTORS = 4


class ControlEndedError(ConnectionError):
    """The other process has ended."""


class StartDelegate(TaggedMessage, tag="start", frozen=True, kw_only=True):
    """First message to the delegate: rank, job and limits. The listening sockets named in `listeners` travel with
    it."""

    rank: Natural
    job: str
    """Name of the job, hexadecimal, like `secret`."""
    secret: str
    listeners: list[str]
    """Kind of each descriptor sent along: "shm" (unix socket) or "tcp" (for verbs too)."""
    handshake_s: float
    stall_s: float
    max_message_nbytes: Natural
    rnics: list[str] = []
    """verbs: RDMA devices to use; empty: all with a link."""


class OpenLink(TaggedMessage, tag="open", frozen=True, kw_only=True):
    """To the delegate: bring up the link to `peer`. The outbound ring and, except over shm, the inbound ring travel
    with it.

    It ends a session that is up. `session` counts the attempts; messages about an earlier one are ignored.
    """

    peer: Natural
    """Global rank of the peer."""
    session: Natural
    transport: str
    """"shm", "tcp" or "verbs". After three sessions over verbs that did not begin, tcp is used for good."""
    connects: bool
    """True if this side connects (to `address`); False if it waits for the peer to connect."""
    address: list[str | Natural]
    """shm: name of the abstract unix socket. tcp, verbs: host and port."""
    source: str
    """tcp, verbs: address to connect from; "" for any."""
    lanes: Natural
    """Number of connections. shm: 1. verbs: used where it falls back to tcp."""
    opening: Natural = 1
    """Number of this opening of the link: see handshake.Purpose."""


class CloseLink(TaggedMessage, tag="close", frozen=True, kw_only=True):
    """To the delegate: drain the outbound ring for at most `drain_s`, then close the link and refuse connections for
    it."""

    peer: Natural
    opening: Natural
    drain_s: float


class Listen(TaggedMessage, tag="listen", frozen=True, kw_only=True):
    """To the delegate: accept connections on one more listening socket, which travels with this."""


class Report(TaggedMessage, tag="report", frozen=True, kw_only=True):
    """To the delegate: ask for `Counters`."""

    number: Natural


class Ping(TaggedMessage, tag="ping", frozen=True, kw_only=True):
    """To the delegate: ask for `Pong`, which proves that it runs."""

    number: Natural


class Stop(TaggedMessage, tag="stop", frozen=True, kw_only=True):
    """To the delegate: drain the outbound rings for at most `drain_s`, then exit."""

    drain_s: float


class Up(TaggedMessage, tag="up", frozen=True, kw_only=True):
    """From the delegate: the session carries frames. Over shm the inbound ring travels with this."""

    peer: Natural
    session: Natural
    transport: str
    """Wire that carries the session: shm, tcp or verbs."""


class Down(TaggedMessage, tag="down", frozen=True, kw_only=True):
    """From the delegate: the session has ended and its rings are closed."""

    peer: Natural
    session: Natural
    cause: str


class DelegateCounters(TaggedMessage, tag="counters", frozen=True, kw_only=True):
    """From the delegate: counters since it started."""

    number: Natural
    refused: dict[str, Natural] = {}
    """Number of refused connections, by handshake.Refusal."""
    sent_nbytes: Natural = 0
    received_nbytes: Natural = 0


class Pong(TaggedMessage, tag="pong", frozen=True, kw_only=True):
    """From the delegate: the answer to the `Ping` of that number."""

    number: Natural


Message = StartDelegate | OpenLink | CloseLink | Listen | Report | Ping | Stop | Up | Down | DelegateCounters | Pong


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. Raises ControlEndedError if the other process has ended or does not read."""
    try:
        socket.send_fds(channel, [packed(message)], list(descriptors))
    except OSError as cause:
        raise ControlEndedError(f"the other process does not listen: {cause}") from cause


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """Receive one packet and its descriptors, which the caller owns. Raises ControlEndedError, BlockingIOError."""
    try:
        packet, descriptors, flags, _address = socket.recv_fds(
            channel, _LARGEST_NBYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError as cause:
        raise ControlEndedError(str(cause)) from cause
    if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ControlEndedError("the other process is gone" if not packet else "a message was cut off")
    try:
        return unpacked(packet, Message, _LARGEST_NBYTES), descriptors
    except ValueError as cause:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ControlEndedError(f"invalid message from the other process: {cause}") from cause
