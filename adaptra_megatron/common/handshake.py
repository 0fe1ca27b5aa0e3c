# SPDX-License-Identifier: Apache-2.0
"""Authenticate connections: both ends prove that they know the job's secret, before any other data is sent.

    accepting side                       connecting side
    challenge: magic, version, nonce ->
                                      <- answer: purpose of the connection, nonce, HMAC over all so far
    confirmation: HMAC over all so far ->

All three messages have a fixed size, so an unauthenticated peer cannot make either side allocate memory. A recorded
proof is useless for another connection or in the other direction: each proof covers both nonces and a label of its
side. The following traffic is not encrypted, as NCCL's is not. This module does not import torch, because the delegate
imports it.

Any process may connect to our listening sockets. Peers without a valid proof are refused and counted.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import os
import random
import secrets
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from ipaddress import ip_network
from typing import Any, NamedTuple, TypeVar

from adaptra_megatron.common.log import RateLimitedLog, logger_of

_TCP_INFO = struct.Struct("=2xB53xI")
"""Fields of the kernel's tcp_info: tcpi_retransmits (timeouts in a row) and tcpi_last_ack_recv (ms ago)."""
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class ConnectionEndedError(ConnectionError):
    """The other side closed the connection, or it broke."""


async def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Read exactly `nbytes`, never beyond them. Raises ConnectionEndedError if they do not come."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < nbytes:
        part = await loop.sock_recv(connection, nbytes - len(received))
        if not part:
            raise ConnectionEndedError(f"it ended after {len(received)} of {nbytes} bytes")
        received += part
    return bytes(received)


async def receive_descriptor(connection: socket.socket) -> int:
    """Receive one file descriptor from a non-blocking unix socket; the caller owns it. Raises ConnectionEndedError."""
    await wait_readable(connection)
    data, descriptors, _flags, _address = socket.recv_fds(connection, 1, 4, _RECEIVE_FLAGS)
    if not data or len(descriptors) != 1:
        # Close surplus descriptors: a peer could otherwise use up this process's.
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionEndedError(f"{len(descriptors)} file descriptors came instead of 1")
    return descriptors[0]


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """Send a file descriptor over a unix socket; the caller's stays open."""
    socket.send_fds(connection, [b"\0"], [descriptor])


async def wait_readable(connection: socket.socket) -> None:
    """Wait until the connection has data to read, or has ended."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    # asyncio has no recv_fds, and a plain read would discard the descriptor.
    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)


def tune_connection(connection: socket.socket) -> None:
    """Set up a TCP connection between delegates: no delays, and an end within 15 s once the other host has failed.

    The limit covers idle connections only. For data in flight the kernel offers TCP_USER_TIMEOUT, which would also end
    connections to a live peer whose buffers are full because its training process is stopped. `acknowledges` covers
    those.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 5 s idle, then 5 probes every 2 s: 15 s.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


def acknowledges(connection: socket.socket, within_s: float) -> bool:
    """Return whether the other host has acknowledged data within `within_s`, or no sent data awaits acknowledgement.

    Data that waits for buffer space at the other end does not count as sent.
    """
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    timeouts, last_ms = _TCP_INFO.unpack(information)
    return not timeouts or last_ms <= within_s * 1e3


Result = TypeVar("Result")

SECRET_NBYTES, NONCE_NBYTES, SESSION_NBYTES, JOB_NBYTES = 32, 32, 16, 16

_MAGIC = b"adaptra\n"
VERSION = 4
"""Raised with every change of what connections carry: of this handshake, frames, or control messages."""
_CHALLENGE = struct.Struct(f"<8sI{NONCE_NBYTES}s")
CHALLENGE_NBYTES = _CHALLENGE.size
"""Size of the challenge, which every process that connects is sent."""
_PURPOSE = struct.Struct(f"<{JOB_NBYTES}sII{SESSION_NBYTES}sHHBQ")
_PROOF_NBYTES = hashlib.sha256().digest_size
ANSWER_NBYTES = _PURPOSE.size + NONCE_NBYTES + _PROOF_NBYTES


class HandshakeRefusal(enum.Enum):
    """Reason why a connection was refused."""

    JUNK = "junk"
    """The bytes received are no handshake of ours."""
    WRONG_SECRET = "wrong_secret"
    """The proof is wrong: another job, a replayed connection, an attack."""
    HALF_OPEN = "half_open"
    """The other side left, or said nothing until the deadline."""
    MISDIRECTED = "misdirected"
    """The peer knows the secret but asks for something that is not here."""


class HandshakeError(RuntimeError):
    """The other side failed to authenticate."""

    def __init__(self, refusal: HandshakeRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Purpose(NamedTuple):
    """Purpose of a connection, as the connecting side states it."""

    job: bytes
    """Identity of the job."""
    source: int
    """Rank that connects."""
    target: int
    """Rank that accepts."""
    session: bytes
    """Random number, equal for all connections of one session."""
    lane: int
    """Index of this connection in its session, from 0."""
    lanes: int
    """Number of connections of the session."""
    wire: int = 0
    """Number of the wire that the connecting side proposes for the session; 0 if there is only one."""
    opening: int = 1
    """Number of the link's opening: connections of an earlier opening are not used."""


async def accept(connection: socket.socket, secret: bytes, timeout_s: float) -> Purpose:
    """Authenticate the accepting side of a non-blocking `connection`; return its purpose. Raises HandshakeError."""
    return await _finish(_accept(connection, secret), timeout_s)


async def connect(connection: socket.socket, secret: bytes, purpose: Purpose, timeout_s: float) -> None:
    """Authenticate the connecting side of a connected, non-blocking `connection`. Raises HandshakeError."""
    await _finish(_connect(connection, secret, purpose), timeout_s)


async def _accept(connection: socket.socket, secret: bytes) -> Purpose:
    loop = asyncio.get_running_loop()
    # A fresh nonce for each connection: a recorded answer authenticates nobody.
    challenge = _CHALLENGE.pack(_MAGIC, VERSION, secrets.token_bytes(NONCE_NBYTES))
    await loop.sock_sendall(connection, challenge)
    answer = await receive_exactly(connection, ANSWER_NBYTES)
    said, proof = answer[:-_PROOF_NBYTES], answer[-_PROOF_NBYTES:]
    purpose = Purpose(*_PURPOSE.unpack(said[: _PURPOSE.size]))
    # compare_digest takes the same time wherever the proofs differ. The purpose is unpacked, but not used, before this
    # check.
    if not hmac.compare_digest(proof, _proof(secret, b"connecting", challenge + said)):
        raise HandshakeError(_why_wrong(purpose), "the proof of knowing the job's secret is wrong")
    await loop.sock_sendall(connection, _proof(secret, b"accepting", challenge + answer))
    return purpose


async def _connect(connection: socket.socket, secret: bytes, purpose: Purpose) -> None:
    loop = asyncio.get_running_loop()
    challenge = await receive_exactly(connection, _CHALLENGE.size)
    magic, version, _nonce = _CHALLENGE.unpack(challenge)
    if magic != _MAGIC:
        raise HandshakeError(HandshakeRefusal.JUNK, "something else answers at this address")
    if version != VERSION:
        raise HandshakeError(
            HandshakeRefusal.JUNK, f"the peer speaks version {version}, this side {VERSION}: install the same package"
        )
    said = _PURPOSE.pack(*purpose) + secrets.token_bytes(NONCE_NBYTES)
    answer = said + _proof(secret, b"connecting", challenge + said)
    await loop.sock_sendall(connection, answer)
    proof = await receive_exactly(connection, _PROOF_NBYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"accepting", challenge + answer)):
        raise HandshakeError(HandshakeRefusal.WRONG_SECRET, "the peer does not know the job's secret")


async def _finish(handshake: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    try:
        return await asyncio.wait_for(handshake, timeout_s)
    except asyncio.TimeoutError as cause:
        raise HandshakeError(HandshakeRefusal.HALF_OPEN, f"the handshake took longer than {timeout_s:g} s") from cause
    except OSError as cause:
        raise HandshakeError(HandshakeRefusal.HALF_OPEN, f"the handshake was not finished: {cause}") from cause


def _proof(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b":" + transcript, "sha256")


def _why_wrong(purpose: Purpose) -> HandshakeRefusal:
    """Return the reason to count for a wrong proof: junk if its fields are impossible, else a wrong secret."""
    sensible = max(purpose.source, purpose.target) < 1 << 20 and purpose.lane < purpose.lanes
    return HandshakeRefusal.WRONG_SECRET if sensible else HandshakeRefusal.JUNK


logger = logger_of(__name__)

MOST_UNPROVEN = 64
"""Maximum number of connections in their handshake.

Beyond it, a random connection of the source with the most of them is dropped. Dropping the oldest would hit distant
peers, and dropping the newest those that come after silent ones.
"""
_PAUSE_S = 0.1
"""Pause after an error of accept() that the peer did not cause (no file descriptors left)."""

_PEER = struct.Struct("3i")
"""Layout of struct ucred."""

Admit = Callable[[Purpose, socket.socket], Awaitable[None]]


class Acceptor:
    """Accepts connections on any number of listening sockets."""

    def __init__(self, secret: bytes, timeout_s: float, admit: Admit, most_unproven: int = MOST_UNPROVEN) -> None:
        """`admit` is called with each proven connection (non-blocking) and owns it; it raises HandshakeError to refuse.

        `most_unproven`: maximum number of connections in their handshake at once. Raise it if more peers connect
        together.
        """
        self.refused: Counter[HandshakeRefusal] = Counter()
        self._secret, self._timeout_s, self._admit, self._most_unproven = secret, timeout_s, admit, most_unproven
        self._unproven: dict[asyncio.Task[None], str] = {}
        """Tasks in their handshake, with the sources of their connections."""
        self._proven: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Task[None]] = []
        self._failures = RateLimitedLog(logger)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket until `close`."""
        listener.setblocking(False)
        self._listening.append(asyncio.ensure_future(self._accept_for_ever(listener)))

    def close(self) -> None:
        """Stop accepting connections. The listening sockets stay open."""
        for task in (*self._listening, *self._unproven):
            task.cancel()

    async def _accept_for_ever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as cause:
                self._failures.warning("cannot accept connections: %s", cause)
                await asyncio.sleep(_PAUSE_S)
                continue
            source = _source(connection, address)
            if len(self._unproven) >= self._most_unproven:
                self._make_room(source)
            task = asyncio.ensure_future(self._greet(connection))
            self._unproven[task] = source
            task.add_done_callback(self._forget)
            # sock_accept does not yield while connections wait: without this, a burst would be accepted before any
            # handshake proceeds.
            await asyncio.sleep(0)

    def _make_room(self, source_of_new: str) -> None:
        by_source: dict[str, list[asyncio.Task[None]]] = defaultdict(list, {source_of_new: []})
        for task, source in self._unproven.items():
            by_source[source].append(task)
        # The new connection's own source counts one more: a flood drops its own connections, not those of other hosts.
        crowd = max(by_source, key=lambda source: len(by_source[source]) + (source == source_of_new))
        dropped = random.choice(by_source[crowd])
        del self._unproven[dropped]
        dropped.cancel()

    async def _greet(self, connection: socket.socket) -> None:
        try:
            purpose = await accept(connection, self._secret, self._timeout_s)
        except HandshakeError as cause:
            self._refuse(connection, cause.refusal)
            return
        except asyncio.CancelledError:
            self._refuse(connection, HandshakeRefusal.HALF_OPEN)
            raise
        self._prove()
        try:
            await self._admit(purpose, connection)
        except HandshakeError as cause:
            self._refuse(connection, cause.refusal)
        except BaseException:
            connection.close()
            raise

    def _prove(self) -> None:
        """Mark the running task as proven: it is not cancelled to make room, since a session now begins in it."""
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        self._proven.add(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._proven.discard(task)

    def _refuse(self, connection: socket.socket, refusal: HandshakeRefusal) -> None:
        self.refused[refusal] += 1
        connection.close()


def _source(connection: socket.socket, address: Any) -> str:
    """Return what is known of a peer before authentication: its host (of IPv6, the network), or its local user."""
    if connection.family == socket.AF_UNIX:
        _process, user, _group = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return f"user {user}"
    host = str(address[0])
    # One host may have a whole IPv6 /64: per address, a flood would count as many sources.
    return str(ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host
