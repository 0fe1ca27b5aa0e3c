# SPDX-License-Identifier: Apache-2.0
"""One link in a delegate: sessions come up when both training processes ask for one, and go down for one cause each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable

from adaptra_megatron.transport import handshake
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.control import Down, Message, Open, Start, Up
from adaptra_megatron.transport.handshake import HandshakeError, Purpose, Refusal
from adaptra_megatron.transport.shm_wire import ShmWire
from adaptra_megatron.transport.tcp_wire import TcpWire
from adaptra_megatron.transport.verbs_wire import LANES as VERBS_LANES
from adaptra_megatron.transport.verbs_wire import VerbsWire
from adaptra_megatron.transport.wire import Traffic, Wire

MOST_LANES = 64
VERBS_ATTEMPTS = 3
_BIND_ADDRESS_NO_PORT = 24
"""IP_BIND_ADDRESS_NO_PORT of Linux, which Python has from 3.12 on; for IPv6 too."""
logger = logging.getLogger("adaptra_megatron.transport.link_session")
Tell = Callable[[Message, list[int]], None]


class LinkSession:
    """The link to one peer: at most one session at a time, and the peer's connections for the next.

    Whoever connects proposes what carries the session, and the other follows. Over verbs that is tried again after
    each failure, until VERBS_ATTEMPTS sessions in a row have not begun: from then on it proposes tcp.
    """

    def __init__(self, start: Start, peer: int, tell: Tell) -> None:
        """`tell` sends a message, and file descriptors, to the training process."""
        self._start, self._peer, self._tell = start, peer, tell
        self._changing = asyncio.Lock()
        self._request: Open | None = None
        self._rings: list[Ring] = []
        self._wire: Wire | None = None
        self._begun = False
        self._verbs_failures = 0
        self._earlier = Traffic(0, 0)
        self._arrived: dict[int, socket.socket] = {}
        self._arrived_for: Purpose | None = None

    async def open(self, request: Open, rings: list[Ring]) -> None:
        """Bring up a session with the training process's rings. Its end, or failure, is told as `Down`."""
        async with self._changing:
            await self._finish(None)
            self._request, self._rings = request, rings
            if not request.connects:
                await self._begin_if_complete()
                return
            transport = request.transport
            if transport == "verbs" and self._verbs_failures >= VERBS_ATTEMPTS:
                transport = "tcp"
            try:
                connections = await self._connect(request, transport)
            except (OSError, HandshakeError, asyncio.TimeoutError) as cause:
                await self._finish(f"cannot connect to {_spelled(request)}: {cause or 'it took too long'}")
                return
            await self._begin(transport, connections)

    async def admit(self, purpose: Purpose, connection: socket.socket) -> None:
        """A proven connection of the peer. Raises HandshakeError if it cannot be used."""
        async with self._changing:
            lanes = purpose.lanes if self._request is None else _lanes(self._request, purpose.verbs)
            if not purpose.lane < purpose.lanes == lanes <= MOST_LANES:
                raise HandshakeError(Refusal.MISDIRECTED, f"lane {purpose.lane} of {purpose.lanes}, not of {lanes}")
            if self._arrived_for is None or purpose.session != self._arrived_for.session:
                self._drop_arrived()
                self._arrived_for = purpose
                if self._begun:
                    await self._finish("the peer began anew")
            if purpose.lane in self._arrived:
                raise HandshakeError(Refusal.MISDIRECTED, f"lane {purpose.lane} came twice")
            self._arrived[purpose.lane] = connection
            await self._begin_if_complete()

    async def drain(self, timeout_s: float) -> None:
        """Let what the training process has written leave."""
        if self._wire is not None and self._begun:
            await self._wire.drain(timeout_s)

    async def stop(self) -> None:
        """End whatever there is."""
        async with self._changing:
            await self._finish(None)
            self._drop_arrived()

    def traffic(self) -> Traffic:
        """Of all sessions together."""
        now = self._wire.traffic() if self._wire is not None else Traffic(0, 0)
        return Traffic(*(a + b for a, b in zip(self._earlier, now, strict=True)))

    def _make_wire(self, request: Open, transport: str) -> Wire:
        if transport == "shm":
            return ShmWire(self._rings[0], self._start.handshake_s)
        outbound, inbound = self._rings
        if transport == "verbs":
            devices, timeout_s = self._start.rnics, self._start.handshake_s
            return VerbsWire(outbound, inbound, connects=request.connects, devices=devices, timeout_s=timeout_s)
        limit, stall_s = self._start.max_message_nbytes, self._start.stall_s
        return TcpWire(outbound, inbound, max_message_nbytes=limit, stall_s=stall_s)

    async def _connect(self, request: Open, transport: str) -> list[socket.socket]:
        session = secrets.token_bytes(handshake.SESSION_NBYTES)
        pipeline = bytes.fromhex(self._start.pipeline)
        verbs = transport == "verbs"
        lanes = _lanes(request, verbs)
        connections: list[socket.socket] = []
        try:
            for lane in range(lanes):
                connections.append(_unconnected(request))
                address = _address(request)
                loop = asyncio.get_running_loop()
                await asyncio.wait_for(loop.sock_connect(connections[-1], address), self._start.handshake_s)
                purpose = Purpose(pipeline, self._start.stage, self._peer, session, lane, lanes, verbs)
                secret = bytes.fromhex(self._start.secret)
                await handshake.connect(connections[-1], secret, purpose, self._start.handshake_s)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return connections

    async def _begin_if_complete(self) -> None:
        request, purpose = self._request, self._arrived_for
        if request is None or self._begun or request.connects or purpose is None:
            return
        lanes = _lanes(request, purpose.verbs)
        if len(self._arrived) < lanes:
            return
        connections = [self._arrived[lane] for lane in range(lanes)]
        self._arrived = {}
        transport = request.transport if request.transport != "verbs" or purpose.verbs else "tcp"
        await self._begin(transport, connections)

    async def _begin(self, transport: str, connections: list[socket.socket]) -> None:
        request = self._request
        assert request is not None
        self._wire = wire = self._make_wire(request, transport)
        self._begun = True
        try:
            await wire.begin(connections, lambda cause: self._ended(request.session, cause))
        except (OSError, RuntimeError) as cause:  # RingError, or no memory or descriptor
            if transport == "verbs" and request.connects:
                self._note_verbs_failure(str(cause))
            await self._finish(str(cause))
            return
        if transport == "verbs":
            self._verbs_failures = 0
        descriptors = [wire.inbound.fd] if wire.inbound is not None else []
        self._tell(Up(peer=self._peer, session=request.session, transport=transport), descriptors)

    def _note_verbs_failure(self, cause: str) -> None:
        self._verbs_failures += 1
        if self._verbs_failures == VERBS_ATTEMPTS:
            logger.warning(
                "link %d<->%d: tcp from now on, as no session over verbs began in %d attempts: %s",
                *(self._start.stage, self._peer, VERBS_ATTEMPTS, cause),
            )

    def _ended(self, session: int, cause: str) -> None:
        asyncio.ensure_future(self._end(session, cause))

    async def _end(self, session: int, cause: str) -> None:
        async with self._changing:
            if self._request is not None and self._request.session == session:
                await self._finish(cause)

    async def _finish(self, cause: str | None) -> None:
        """End the session, if there is one, and tell why unless the training process knows."""
        wire, request = self._wire, self._request
        self._wire, self._request, self._begun = None, None, False
        if wire is not None:
            await wire.stop()
            self._earlier = Traffic(*(a + b for a, b in zip(self._earlier, wire.traffic(), strict=True)))
        for ring in self._rings:
            ring.close()
        self._rings = []
        if request is not None and cause is not None:
            self._tell(Down(peer=self._peer, session=request.session, cause=cause), [])

    def _drop_arrived(self) -> None:
        for connection in self._arrived.values():
            connection.close()
        self._arrived = {}


def _lanes(request: Open, verbs: bool) -> int:
    """Connections of a session that the connecting side proposes over verbs, or not."""
    if not verbs:
        return request.lanes
    return VERBS_LANES if request.transport == "verbs" else 0


def _unconnected(request: Open) -> socket.socket:
    if request.transport == "shm":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family = socket.AF_INET6 if ":" in str(request.address[0]) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        if request.source:
            # Or a port is taken here already, of which there are fewer than of pairs of a port and a peer.
            with contextlib.suppress(OSError):  # a sandbox may not have it
                connection.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            connection.bind((request.source, 0))
    connection.setblocking(False)
    return connection


def _address(request: Open) -> str | tuple[str, int]:
    name, *port = request.address
    return f"\0{name}" if request.transport == "shm" else (str(name), int(port[0]))


def _spelled(request: Open) -> str:
    return f"{request.transport} {':'.join(map(str, request.address))}"
