# SPDX-License-Identifier: Apache-2.0
"""Run one link in a delegate: sessions begin when both training processes request one, and each ends with one cause."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable

from adaptra_megatron.common import handshake
from adaptra_megatron.common.handshake import HandshakeError, HandshakeRefusal, Purpose
from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.delegate.delegate_control import Down, Message, OpenLink, StartDelegate, Up
from adaptra_megatron.transport.wires.wire import Traffic, Wire
from adaptra_megatron.transport.wires.wire_registry import WIRES, WireRequest

MOST_LANES = 64
ATTEMPTS = 3
_BIND_ADDRESS_NO_PORT = 24
"""IP_BIND_ADDRESS_NO_PORT of Linux (IPv4 and IPv6); Python names it from 3.12 on."""
logger = logger_of(__name__)
SendMessage = Callable[[Message, list[int]], None]


class LinkSession:
    """Sessions of the link to one peer, in the delegate: at most one at a time, and connections for the next.

    The end that connects proposes the wire of the session, and the other end accepts it. After ATTEMPTS successive
    sessions that did not begin, it proposes the fallback of its WireKind.
    """

    def __init__(self, start: StartDelegate, peer: int, send: SendMessage, opening: int = 1) -> None:
        """`send(message, descriptors)` reports to the training process. `opening`: number of this opening of the
        link."""
        self.opening = opening
        self._start, self._peer, self._send = start, peer, send
        self._changing = asyncio.Lock()
        self._request: OpenLink | None = None
        self._rings: list[Ring] = []
        self._wire: Wire | None = None
        self._begun = False
        self._failures = 0
        self._earlier = Traffic(0, 0)
        self._arrived: dict[int, socket.socket] = {}
        self._arrived_for: Purpose | None = None
        self._lane_s = 2 * start.handshake_s
        """Longest time between two connections of one session: time to connect and to authenticate."""
        self._expecting: asyncio.Task[None] | None = None
        self._dropped = RateLimitedLog(logger)

    async def open(self, request: OpenLink, rings: list[Ring]) -> None:
        """Begin a session with the training process's rings. Its end, or failure, is reported as `Down`."""
        async with self._changing:
            # Without a Down: the training process has ended that session itself.
            await self._finish(None)
            self._request, self._rings = request, rings
            if not request.connects:
                await self._begin_or_expect()
                return
            transport, instead = request.transport, WIRES[request.transport].falls_back_to
            if instead is not None and self._failures >= ATTEMPTS:
                transport = instead
            try:
                connections = await self._connect(request, transport)
            except (OSError, HandshakeError, asyncio.TimeoutError) as cause:
                await self._finish(f"cannot connect to {_spelled(request)}: {cause or 'it took too long'}")
                return
            await self._begin(transport, connections)

    async def admit(self, purpose: Purpose, connection: socket.socket) -> None:
        """Take over an authenticated connection of the peer. Raises HandshakeError if no session can use it."""
        async with self._changing:
            transport = _proposed(purpose)
            # Without a request, only the peer knows how many it opens; `_begin_if_complete` counts them again.
            lanes = purpose.lanes if self._request is None else _lanes(self._request, transport)
            if not purpose.lane < purpose.lanes == lanes <= MOST_LANES:
                raise HandshakeError(
                    HandshakeRefusal.MISDIRECTED, f"lane {purpose.lane} of {purpose.lanes}, not of {lanes}"
                )
            if self._arrived_for is None or purpose.session != self._arrived_for.session:
                self._drop_arrived()
                self._arrived_for = purpose
                # The peer has begun another session, so the present one has ended there, even if no error has shown
                # here.
                if self._begun:
                    await self._finish("the peer began anew")
            if purpose.lane in self._arrived:
                raise HandshakeError(HandshakeRefusal.MISDIRECTED, f"lane {purpose.lane} came twice")
            self._arrived[purpose.lane] = connection
            await self._begin_or_expect()

    async def drain(self, timeout_s: float) -> None:
        """Wait until the outbound ring is empty, at most `timeout_s`."""
        if self._wire is not None and self._begun:
            await self._wire.drain(timeout_s)

    async def stop(self) -> None:
        """End the session, if any, and close waiting connections."""
        async with self._changing:
            await self._finish(None)
            self._drop_arrived()
            if self._expecting is not None:
                self._expecting.cancel()

    def traffic(self) -> Traffic:
        """Return payload bytes of all sessions of this link."""
        now = self._wire.traffic() if self._wire is not None else Traffic(0, 0)
        return Traffic(*(a + b for a, b in zip(self._earlier, now, strict=True)))

    def _make_wire(self, request: OpenLink, transport: str) -> Wire:
        start = self._start
        return WIRES[transport].make(
            WireRequest(
                self._rings,
                request.connects,
                start.rnics,
                start.handshake_s,
                start.stall_s,
                start.max_message_nbytes,
            )
        )

    async def _connect(self, request: OpenLink, transport: str) -> list[socket.socket]:
        # Random, so that the peer distinguishes connections of this session from those that an earlier one left.
        session = secrets.token_bytes(handshake.SESSION_NBYTES)
        job = bytes.fromhex(self._start.job)
        lanes, wire = _lanes(request, transport), list(WIRES).index(transport)
        connections: list[socket.socket] = []
        try:
            for lane in range(lanes):
                connections.append(_unconnected(request))
                address = _address(request)
                loop = asyncio.get_running_loop()
                await asyncio.wait_for(loop.sock_connect(connections[-1], address), self._start.handshake_s)
                purpose = Purpose(job, self._start.rank, self._peer, session, lane, lanes, wire, self.opening)
                secret = bytes.fromhex(self._start.secret)
                await handshake.connect(connections[-1], secret, purpose, self._start.handshake_s)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return connections

    async def _begin_or_expect(self) -> None:
        """Begin the session if all its connections have arrived; otherwise drop them after `_lane_s`."""
        await self._begin_if_complete()
        if self._expecting is not None:
            self._expecting.cancel()  # it sleeps, or waits for its turn
        self._expecting = asyncio.ensure_future(self._drop_incomplete()) if self._arrived else None

    async def _drop_incomplete(self) -> None:
        await asyncio.sleep(self._lane_s)
        async with self._changing:
            purpose = self._arrived_for
            assert purpose is not None
            if self._request is None and len(self._arrived) == purpose.lanes:
                return  # they wait for this side, which asks when it is ready
            cause = (
                f"the peer had opened {len(self._arrived)} of {purpose.lanes} connections of a session when no other "
                f"had come for {self._lane_s:g} s"
            )
            self._dropped.warning("link %d<->%d: %s: dropped", self._start.rank, self._peer, cause)
            self._drop_arrived()
            if not self._begun:
                await self._finish(cause)

    async def _begin_if_complete(self) -> None:
        request, purpose = self._request, self._arrived_for
        if request is None or self._begun or request.connects or purpose is None:
            return
        transport = _proposed(purpose)
        lanes = _lanes(request, transport)
        if len(self._arrived) < lanes:
            return
        connections = [self._arrived[lane] for lane in range(lanes)]
        self._arrived = {}
        await self._begin(transport, connections)

    async def _begin(self, transport: str, connections: list[socket.socket]) -> None:
        request = self._request
        assert request is not None
        self._wire = wire = self._make_wire(request, transport)
        self._begun = True
        try:
            await wire.begin(connections, lambda cause: self._ended(request.session, cause))
        except (OSError, RuntimeError) as cause:  # RingError, or no memory or descriptor
            if request.connects:
                self._note_failure(transport, str(cause))
            await self._finish(str(cause))
            return
        # A session over the fallback does not count: the link would return to a wire that did not begin.
        if transport == request.transport:
            self._failures = 0
        descriptors = [wire.inbound.fd] if wire.inbound is not None else []
        self._send(Up(peer=self._peer, session=request.session, transport=transport), descriptors)

    def _note_failure(self, transport: str, cause: str) -> None:
        instead = WIRES[transport].falls_back_to
        self._failures += 1
        if self._failures == ATTEMPTS and instead is not None:
            logger.warning(
                "link %d<->%d: %s from now on, as no session over %s began in %d attempts: %s",
                *(self._start.rank, self._peer, instead, transport, ATTEMPTS, cause),
            )

    def _ended(self, session: int, cause: str) -> None:
        # Not at once: a wire may end within `begin`, whose caller holds the lock.
        asyncio.ensure_future(self._end(session, cause))

    async def _end(self, session: int, cause: str) -> None:
        async with self._changing:
            # A wire reports its end in a task of its own: another session may have begun meanwhile.
            if self._request is not None and self._request.session == session:
                await self._finish(cause)

    async def _finish(self, cause: str | None) -> None:
        """End the session, if any. `cause` is reported as `Down`; None: the training process ended it itself."""
        wire, request = self._wire, self._request
        self._wire, self._request, self._begun = None, None, False
        # Before the rings are closed, which the training process notices at once, and which says no cause.
        if request is not None and cause is not None:
            self._send(Down(peer=self._peer, session=request.session, cause=cause), [])
        if wire is not None:
            # Before the rings are closed: no thread may touch them then.
            await wire.stop()
            self._earlier = Traffic(*(a + b for a, b in zip(self._earlier, wire.traffic(), strict=True)))
        for ring in self._rings:
            ring.close()
        self._rings = []

    def _drop_arrived(self) -> None:
        for connection in self._arrived.values():
            connection.close()
        self._arrived = {}


def _proposed(purpose: Purpose) -> str:
    """Return the wire that the connecting side proposes. Raises HandshakeError for an unknown number."""
    if purpose.wire >= len(WIRES):
        raise HandshakeError(HandshakeRefusal.MISDIRECTED, f"there is no wire of number {purpose.wire}")
    return list(WIRES)[purpose.wire]


def _lanes(request: OpenLink, transport: str) -> int:
    """Return the number of connections over `transport`; 0 if this link may not use it."""
    if transport not in (request.transport, WIRES[request.transport].falls_back_to):
        return 0
    return WIRES[transport].lanes or request.lanes


def _unconnected(request: OpenLink) -> socket.socket:
    if WIRES[request.transport].listener == "shm":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family = socket.AF_INET6 if ":" in str(request.address[0]) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        if request.source:
            # bind would otherwise reserve a local port at once; connect only needs a unique pair of local port and
            # peer.
            with contextlib.suppress(OSError):  # a sandbox may not have it
                connection.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            connection.bind((request.source, 0))
    connection.setblocking(False)
    return connection


def _address(request: OpenLink) -> str | tuple[str, int]:
    name, *port = request.address
    return f"\0{name}" if WIRES[request.transport].listener == "shm" else (str(name), int(port[0]))


def _spelled(request: OpenLink) -> str:
    return f"{request.transport} {':'.join(map(str, request.address))}"
