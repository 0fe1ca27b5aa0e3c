# SPDX-License-Identifier: Apache-2.0
"""All listening sockets of ours: any process may connect, only proven peers come in, the rest is counted."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from typing import Any

from adaptra_megatron.common.authentication import handshake
from adaptra_megatron.common.authentication.handshake import HandshakeError, HandshakeRefusal, Purpose
from adaptra_megatron.common.log import RateLimitedLog, logger_of

logger = logger_of(__name__)

MOST_UNPROVEN = 64
"""Connections in their handshake at once; one more, and one of the source that has most of them is dropped. Any of
them: dropping the oldest would hit who is far away, and the newest who comes after silent ones."""
_PAUSE_S = 0.1
"""After an error of accept() that is not the caller's fault (no file descriptors left)."""

_PEER = struct.Struct("3i")
"""struct ucred."""

Admit = Callable[[Purpose, socket.socket], Awaitable[None]]


class Acceptor:
    """Accepts connections on any number of listening sockets."""

    def __init__(self, secret: bytes, timeout_s: float, admit: Admit, most_unproven: int = MOST_UNPROVEN) -> None:
        """`admit` gets each proven connection (non-blocking) and owns it; it raises HandshakeError to refuse it.
        `most_unproven`: connections in their handshake at once; more where more peers than that come together."""
        self.refused: Counter[HandshakeRefusal] = Counter()
        self._secret, self._timeout_s, self._admit, self._most_unproven = secret, timeout_s, admit, most_unproven
        self._unproven: dict[asyncio.Task[None], str] = {}
        """With their sources."""
        self._proven: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Task[None]] = []
        self._failures = RateLimitedLog(logger)

    def listen(self, listener: socket.socket) -> None:
        """Accept on a listening socket until `close`."""
        listener.setblocking(False)
        self._listening.append(asyncio.ensure_future(self._accept_for_ever(listener)))

    def close(self) -> None:
        """Accept no connections any more. The listening sockets stay open."""
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
            # Accepting what waits already does not yield: a burst would come before all cancellations and handshakes.
            await asyncio.sleep(0)

    def _make_room(self, newcomer: str) -> None:
        by_source: dict[str, list[asyncio.Task[None]]] = defaultdict(list, {newcomer: []})
        for task, source in self._unproven.items():
            by_source[source].append(task)
        crowd = max(by_source, key=lambda source: len(by_source[source]) + (source == newcomer))
        dropped = random.choice(by_source[crowd])
        del self._unproven[dropped]
        dropped.cancel()

    async def _greet(self, connection: socket.socket) -> None:
        try:
            purpose = await handshake.accept(connection, self._secret, self._timeout_s)
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
        """From here on the running task is not ended to make room: a session begins in it, which takes its time."""
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
    """Return what can be told of who connects before anything is proven: a host (of IPv6, the network), or a user of
    ours."""
    if connection.family == socket.AF_UNIX:
        _process, user, _group = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return f"user {user}"
    host = str(address[0])
    return str(ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host
