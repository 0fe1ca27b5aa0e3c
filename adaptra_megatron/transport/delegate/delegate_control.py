# SPDX-License-Identifier: Apache-2.0
"""Control messages between a training process and its delegate, over a unix socket that no other process holds.

1. One packet is one JSON object; descriptors of rings and sockets travel with it (SCM_RIGHTS).
2. StartDelegate is first. The end of the socket is the end of the other process: the delegate exits, the training
   process starts another.
3. Each OpenLink has a session number; Up and Down repeat it. What comes of an earlier session is void.
4. A session that the training process did not end itself (CloseLink, another OpenLink, Stop) ends in one Down.
5. Fields are typed. An impossible packet counts as the end of the other process (ControlEndedError).

This module does not import torch, as the delegate imports it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, packed, unpacked

_LARGEST_NBYTES = 1 << 16
_MOST_DESCRIPTORS = 4


class ControlEndedError(ConnectionError):
    """The other process is gone."""


class StartDelegate(TaggedMessage, tag="start", frozen=True, kw_only=True):
    """To the delegate, first: who it works for. With the listening sockets named in `listeners`."""

    rank: Natural
    job: str
    """Its name, hexadecimal as the secret."""
    secret: str
    listeners: list[str]
    """What the descriptors are: "shm" (unix socket), "tcp" (for verbs too)."""
    handshake_s: float
    stall_s: float
    max_message_nbytes: Natural
    rnics: list[str] = []
    """verbs: RDMA devices to use; none for all with a link."""


class OpenLink(TaggedMessage, tag="open", frozen=True, kw_only=True):
    """To the delegate: bring up the link to `peer`. With the outbound ring and, except over shm, the inbound ring.

    A link that is up goes down first. `session` counts the attempts; what is said of an earlier one is void.
    """

    peer: Natural
    """Its rank, as everywhere here."""
    session: Natural
    transport: str
    """shm, tcp, or verbs, which falls to tcp for good if no session over verbs begins."""
    connects: bool
    """Set if this side connects (to `address`); otherwise it waits for the peer to."""
    address: list[str | int]
    """shm: name of the abstract unix socket. tcp, verbs: host and port."""
    source: str
    """tcp, verbs: address to connect from; "" for any."""
    lanes: Natural
    """shm: 1. tcp: how many connections. verbs: how many if it falls to tcp."""
    opening: Natural = 1
    """Which opening of the link this is: see handshake.Purpose."""


class CloseLink(TaggedMessage, tag="close", frozen=True, kw_only=True):
    """To the delegate: let what is in the outbound ring leave, then forget the link to `peer` and refuse its like."""

    peer: Natural
    opening: Natural
    drain_s: float


class Listen(TaggedMessage, tag="listen", frozen=True, kw_only=True):
    """To the delegate: accept connections on the listening socket that comes with it, too."""


class Report(TaggedMessage, tag="report", frozen=True, kw_only=True):
    """To the delegate: ask for `Counters`."""

    number: Natural


class Ping(TaggedMessage, tag="ping", frozen=True, kw_only=True):
    """To the delegate: ask for `Pong`, which proves that it runs."""

    number: Natural


class Stop(TaggedMessage, tag="stop", frozen=True, kw_only=True):
    """To the delegate: let what is in the outbound rings leave, then end."""

    drain_s: float


class Up(TaggedMessage, tag="up", frozen=True, kw_only=True):
    """From the delegate: the link carries frames. Over shm with the inbound ring."""

    peer: Natural
    session: Natural
    transport: str
    """shm, tcp or verbs: what carries them."""


class Down(TaggedMessage, tag="down", frozen=True, kw_only=True):
    """From the delegate: the link's session is over, and its rings are closed."""

    peer: Natural
    session: Natural
    cause: str


class DelegateCounters(TaggedMessage, tag="counters", frozen=True, kw_only=True):
    """From the delegate: what it has seen since it started."""

    number: Natural
    refused: dict[str, Natural] = {}
    """Connections that were not admitted, by handshake.Refusal."""
    sent_nbytes: Natural = 0
    received_nbytes: Natural = 0


class Pong(TaggedMessage, tag="pong", frozen=True, kw_only=True):
    """From the delegate: the answer to the `Ping` of that number."""

    number: Natural


Message = StartDelegate | OpenLink | CloseLink | Listen | Report | Ping | Stop | Up | Down | DelegateCounters | Pong


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Raises ControlEndedError if the other process is gone or does not listen."""
    try:
        socket.send_fds(channel, [packed(message)], list(descriptors))
    except OSError as cause:
        raise ControlEndedError(f"the other process does not listen: {cause}") from cause


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """The next message and its descriptors, which the caller then owns. Raises ControlEndedError, BlockingIOError."""
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
