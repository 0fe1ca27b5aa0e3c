# SPDX-License-Identifier: Apache-2.0
"""Other hosts: several TCP connections between two delegates, each with a native pump per direction.

Frames leave from the outbound ring's own memory and are received into that of the inbound ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from adaptra_megatron.transport._ring import PEER_ENDED, PumpCounters, Ring, receive_frames, send_frames
from adaptra_megatron.transport.socket_io import tune_connection
from adaptra_megatron.transport.wire import Traffic


class TcpWire:
    """Wire over proven TCP connections; frames are spread over them as each has room."""

    def __init__(self, outbound: Ring, inbound: Ring, *, max_message_nbytes: int, stall_s: float) -> None:
        self.inbound: Ring | None = None
        self._outbound, self._received = outbound, inbound
        self._max_message_nbytes, self._stall_s = max_message_nbytes, stall_s
        self._connections: Sequence[socket.socket] = ()
        self._senders: list[asyncio.Future[None]] = []
        self._receivers: list[asyncio.Future[None]] = []
        self._sent, self._taken = PumpCounters(), PumpCounters()
        self._ended: Callable[[str], None] = lambda cause: None

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        self._connections, self._ended = connections, ended
        for lane, connection in enumerate(connections):
            tune_connection(connection)
            self._senders.append(self._pump(f"send-{lane}", self._send, connection))
            self._receivers.append(self._pump(f"receive-{lane}", self._receive, connection))

    async def stop(self) -> None:
        self._outbound.close()
        self._received.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the peer may have ended it already
                connection.shutdown(socket.SHUT_RDWR)
        if pumps := [*self._senders, *self._receivers]:
            await asyncio.wait(pumps)
        for connection in self._connections:
            connection.close()

    async def drain(self, timeout_s: float) -> None:
        if self._senders:
            await asyncio.wait(self._senders, timeout=timeout_s)

    def traffic(self) -> Traffic:
        return Traffic(self._sent.nbytes, self._taken.nbytes)

    def _send(self, connection: socket.socket) -> str:
        return send_frames(self._outbound, connection.fileno(), self._sent)

    def _receive(self, connection: socket.socket) -> str:
        return receive_frames(self._received, connection.fileno(), self._max_message_nbytes, self._stall_s, self._taken)

    def _pump(self, name: str, run: Callable[[socket.socket], str], connection: socket.socket) -> asyncio.Future[None]:
        """A thread that runs until its end is reported; the future is done when it has ended."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def end(cause: str) -> None:
            over.set_result(None)
            # After an orderly end of one connection the others may still hold what was sent before.
            if cause and (cause != PEER_ENDED or all(receiver.done() for receiver in self._receivers)):
                self._ended(cause)

        def body() -> None:
            cause = run(connection)
            with contextlib.suppress(RuntimeError):  # the delegate has ended, and its loop with it
                loop.call_soon_threadsafe(end, cause)

        threading.Thread(target=body, name=name, daemon=True).start()
        return over
