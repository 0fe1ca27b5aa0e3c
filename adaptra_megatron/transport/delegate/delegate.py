# SPDX-License-Identifier: Apache-2.0
"""Run the delegate, a small sidecar process of each training process that connects, authenticates and carries its
links.

The delegate ends with its parent, whatever ends the parent: the kernel kills it, and its control socket closes. Other
signals to the processes of a job (SIGTERM, Ctrl-C) are for the parent to handle: the delegate has a session of its own,
and blocks those signals. All its resources (rings, sockets) are anonymous and end with it. It imports neither torch nor
Megatron, and uses no CPU when idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Coroutine

from adaptra_megatron.common.handshake import Acceptor, HandshakeError, HandshakeRefusal, Purpose, wait_readable
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Ring, die_with_parent
from adaptra_megatron.transport.delegate import delegate_control as control
from adaptra_megatron.transport.delegate.delegate_control import (
    CloseLink,
    ControlEndedError,
    DelegateCounters,
    Down,
    Listen,
    Message,
    OpenLink,
    Ping,
    Pong,
    Report,
    StartDelegate,
    Stop,
)
from adaptra_megatron.transport.delegate.link_session import LinkSession
from adaptra_megatron.transport.wires.wire import Traffic

logger = logger_of(__name__)


class Delegate:
    """Serve one training process: carry out the requests of its control socket until that closes."""

    def __init__(self, channel: socket.socket, start: StartDelegate, listeners: list[socket.socket]) -> None:
        self._channel, self._start, self._listeners = channel, start, listeners
        self._links: dict[int, LinkSession] = {}
        self._closed: dict[int, int] = {}
        """By peer: the latest opening of its link that has been closed."""
        self._earlier = Traffic(0, 0)
        """Counters of links that have been closed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(bytes.fromhex(start.secret), start.handshake_s, self._admit)

    async def serve(self) -> None:
        """Serve requests; return when asked to stop. Raises ControlEndedError when the training process has ended."""
        for listener in self._listeners:
            self._acceptor.listen(listener)
        while True:
            message, descriptors = await _next(self._channel)
            if isinstance(message, Stop):
                self._acceptor.close()  # first: a session that began now would not be drained
                await asyncio.gather(*(link.drain(message.drain_s) for link in self._links.values()))
                return
            if isinstance(message, Ping):
                self._send(Pong(number=message.number), [])
            elif isinstance(message, Report):
                self._send(self._counters(message.number), [])
            elif isinstance(message, OpenLink):
                self._open(message, descriptors)
            elif isinstance(message, CloseLink):
                self._begin(self._close(message))
            elif isinstance(message, Listen):
                self._listeners += [socket.socket(fileno=descriptor) for descriptor in descriptors]
                self._acceptor.listen(self._listeners[-1])

    def _open(self, request: OpenLink, descriptors: list[int]) -> None:
        try:
            rings = [Ring.attach(descriptor) for descriptor in descriptors]
        except RuntimeError as cause:  # RingError, or no memory or descriptor
            self._send(Down(peer=request.peer, session=request.session, cause=str(cause)), [])
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        link = self._link(request.peer, request.opening)
        assert link is not None, f"{request} comes after the link was closed"
        # Connecting takes time, and other links must not wait for it.
        self._begin(link.open(request, rings))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, request: CloseLink) -> None:
        # First: a connection of the peer that comes meanwhile must not open the link again.
        self._closed[request.peer] = request.opening
        link = self._links.get(request.peer)
        if link is not None and link.opening <= request.opening:
            del self._links[request.peer]
            await link.drain(request.drain_s)
            await self._stop(link)

    async def _stop(self, link: LinkSession) -> None:
        await link.stop()
        self._earlier = Traffic(*(a + b for a, b in zip(self._earlier, link.traffic(), strict=True)))

    async def _admit(self, purpose: Purpose, connection: socket.socket) -> None:
        if (purpose.job, purpose.target) != (bytes.fromhex(self._start.job), self._start.rank):
            raise HandshakeError(HandshakeRefusal.MISDIRECTED, f"this is rank {self._start.rank}, not {purpose.target}")
        link = self._link(purpose.source, purpose.opening)
        if link is None:
            raise HandshakeError(
                HandshakeRefusal.MISDIRECTED, f"opening {purpose.opening} of this link has been closed"
            )
        await link.admit(purpose, connection)

    def _link(self, peer: int, opening: int) -> LinkSession | None:
        """Return the link's session of this opening, ending the session of an earlier one; None if this opening has
        been closed.

        If the peer connects first, its connections wait for the training process's OpenLink.
        """
        link = self._links.get(peer)
        if opening <= self._closed.get(peer, 0) or (link is not None and opening < link.opening):
            return None
        if link is None or link.opening < opening:
            if link is not None:
                self._begin(self._stop(link))
            link = self._links[peer] = LinkSession(self._start, peer, self._send, opening)
        return link

    def _counters(self, number: int) -> DelegateCounters:
        traffic = [self._earlier, *(link.traffic() for link in self._links.values())]
        return DelegateCounters(
            number=number,
            refused={refusal.value: count for refusal, count in self._acceptor.refused.items()},
            sent_nbytes=sum(link.sent_nbytes for link in traffic),
            received_nbytes=sum(link.received_nbytes for link in traffic),
        )

    def _send(self, message: Message, descriptors: list[int]) -> None:
        with contextlib.suppress(ControlEndedError):  # seen where the channel is read
            control.send(self._channel, message, descriptors)


async def _next(channel: socket.socket) -> tuple[Message, list[int]]:
    while True:
        await wait_readable(channel)
        with contextlib.suppress(BlockingIOError):
            return control.receive(channel)


async def _run(channel: socket.socket) -> None:
    channel.setblocking(False)
    with contextlib.suppress(ControlEndedError):
        start, descriptors = await _next(channel)
        assert isinstance(start, StartDelegate), f"{start} came first"
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        await Delegate(channel, start, listeners).serve()


def main(arguments: list[str]) -> None:
    """Run the delegate. `arguments`: descriptor of the control socket, process id of the parent.

    Ends by `os._exit`: threads that pump frames need not finish.
    """
    control_fd, parent = map(int, arguments)
    die_with_parent(parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s (delegate, process %(process)d)")
    try:
        asyncio.run(_run(socket.socket(fileno=control_fd)))
    except Exception:
        logger.exception("internal error in the delegate")
        os._exit(1)
    os._exit(0)
