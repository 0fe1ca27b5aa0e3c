# SPDX-License-Identifier: Apache-2.0
"""Wire between hosts: several TCP connections between two delegates, each with a native pump per direction.

Frames are sent directly from the memory of the outbound ring, and received directly into the memory of the inbound
ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from adaptra_megatron.common.handshake import acknowledges, tune_connection
from adaptra_megatron.transport._ring import PEER_ENDED, PumpCounters, Ring, receive_frames, send_frames
from adaptra_megatron.transport.wires.wire import Traffic

ENDING_S = 2.0
"""Time between the first and the last connection's end when the peer ends a session on purpose."""
DEAD_S = 15.0
"""Time without acknowledgement after which a host counts as unreachable."""
LOOK_S = 5.0
_ESTABLISHED = 1
"""State in tcp_info of a connection that neither side has ended."""


class TcpWire:
    """Wire over authenticated TCP connections; each takes the next frame as soon as it has room."""

    def __init__(self, outbound: Ring, inbound: Ring, *, max_message_nbytes: int, stall_s: float) -> None:
        self.inbound: Ring | None = None
        self._outbound, self._received = outbound, inbound
        self._max_message_nbytes, self._stall_s = max_message_nbytes, stall_s
        self._connections: Sequence[socket.socket] = ()
        self._senders: list[asyncio.Future[None]] = []
        self._receivers: list[asyncio.Future[None]] = []
        self._sent, self._taken = PumpCounters(), PumpCounters()
        self._ended: Callable[[str], None] = lambda cause: None
        self._look: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        self._connections, self._ended = connections, ended
        for lane, connection in enumerate(connections):
            tune_connection(connection)
            self._senders.append(self._pump(f"send-{lane}", self._send, connection))
            self._receivers.append(self._pump(f"receive-{lane}", self._receive, connection))
        self._look_for_answers()

    async def stop(self) -> None:
        # Pumps wait in a ring or in a connection: both waits end, and then the threads.
        self._outbound.close()
        self._received.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the peer may have ended it already
                connection.shutdown(socket.SHUT_RDWR)
        if pumps := [*self._senders, *self._receivers]:
            await asyncio.wait(pumps)
        for look in (self._look, self._next_look):
            if look is not None:  # not before: these ends count too
                look.cancel()
        for connection in self._connections:
            connection.close()

    async def drain(self, timeout_s: float) -> None:
        if self._senders:  # they end when a closed ring is empty
            await asyncio.wait(self._senders, timeout=timeout_s)

    def traffic(self) -> Traffic:
        return Traffic(self._sent.nbytes, self._taken.nbytes)

    def _send(self, connection: socket.socket) -> str:
        return send_frames(self._outbound, connection.fileno(), self._sent)

    def _receive(self, connection: socket.socket) -> str:
        return receive_frames(self._received, connection.fileno(), self._max_message_nbytes, self._stall_s, self._taken)

    def _pump(self, name: str, run: Callable[[socket.socket], str], connection: socket.socket) -> asyncio.Future[None]:
        """Run a pump in a thread; return a future that is done when it has ended."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def end(cause: str) -> None:
            over.set_result(None)
            if cause == PEER_ENDED and not all(receiver.done() for receiver in self._receivers):
                # The others may still hold what was sent before.
                self._look = self._look or loop.call_later(ENDING_S, self._look_at_the_others)
            elif cause:
                self._ended(cause)

        def body() -> None:
            # A native loop, which blocks without the GIL: Python pays nothing for a frame.
            cause = run(connection)
            with contextlib.suppress(RuntimeError):  # the delegate has ended, and its loop with it
                loop.call_soon_threadsafe(end, cause)

        threading.Thread(target=body, name=name, daemon=True).start()
        return over

    def _look_for_answers(self) -> None:
        """End the session if data in flight is not acknowledged for DEAD_S: the kernel would retry for much longer."""
        if all(acknowledges(connection, DEAD_S) for connection in self._connections):
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look_for_answers)
        else:
            self._ended(f"the peer's host has acknowledged nothing for {DEAD_S:g} s")

    def _look_at_the_others(self) -> None:
        """End the session if only some connections have ended. A peer that closes ends all of them, so frames were
        lost.
        """
        states = [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for connection in self._connections]
        living = states.count(_ESTABLISHED)
        if living:
            self._ended(f"{len(states) - living} of {len(states)} connections ended, but the peer did not end them")
