# SPDX-License-Identifier: Apache-2.0
"""The listening side of a delegate: everybody may knock, only proven peers come in, the rest is counted."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from adaptra_megatron.transport import handshake
from adaptra_megatron.transport.handshake import HandshakeError, Purpose, Refusal

logger = logging.getLogger("adaptra_megatron.transport.gate")

MOST_UNPROVEN = 64
"""Connections in their handshake at once; one more, and the oldest of them is dropped."""
_PAUSE_S = 0.1
"""After an error of accept() that is not the caller's fault (no file descriptors left)."""

Admit = Callable[[Purpose, socket.socket], Awaitable[None]]


class Gate:
    """Accepts connections on any number of listening sockets."""

    def __init__(self, secret: bytes, timeout_s: float, admit: Admit) -> None:
        """`admit` gets each proven connection (non-blocking) and owns it; it raises HandshakeError to refuse it."""
        self.refused: Counter[Refusal] = Counter()
        self._secret, self._timeout_s, self._admit = secret, timeout_s, admit
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._proven: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Task[None]] = []

    def listen(self, listener: socket.socket) -> None:
        """Accept on a listening socket until `close`."""
        listener.setblocking(False)
        self._listening.append(asyncio.ensure_future(self._accept_for_ever(listener)))

    def close(self) -> None:
        """Accept nobody any more. The listening sockets stay open."""
        for task in (*self._listening, *self._unproven):
            task.cancel()

    async def _accept_for_ever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _address = await loop.sock_accept(listener)
            except OSError as cause:
                logger.warning("cannot accept connections: %s", cause)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._unproven) >= MOST_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            task = asyncio.ensure_future(self._greet(connection))
            self._unproven[task] = None
            task.add_done_callback(self._forget)
            # Accepting what waits already does not yield: a burst would come before all cancellations and handshakes.
            await asyncio.sleep(0)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            purpose = await handshake.accept(connection, self._secret, self._timeout_s)
        except HandshakeError as cause:
            self._refuse(connection, cause.refusal)
            return
        except asyncio.CancelledError:
            self._refuse(connection, Refusal.HALF_OPEN)
            raise
        self._prove()
        try:
            await self._admit(purpose, connection)
        except HandshakeError as cause:
            self._refuse(connection, cause.refusal)

    def _prove(self) -> None:
        """From here on the running task makes room for nobody: a session begins in it, which takes its time."""
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        self._proven.add(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._proven.discard(task)

    def _refuse(self, connection: socket.socket, refusal: Refusal) -> None:
        self.refused[refusal] += 1
        connection.close()
