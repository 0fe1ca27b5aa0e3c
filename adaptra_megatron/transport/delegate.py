# SPDX-License-Identifier: Apache-2.0
"""The delegate: a small process beside each training process that connects, proves and carries its links.

It ends with its parent, however that ends: the kernel kills it, and the control socket ends. What else is sent to the
processes of a job (SIGTERM, Ctrl-C) is its parent's to judge: it has a session of its own, and those signals are
blocked. Everything it holds (rings, sockets) is anonymous and goes with it. It imports neither torch nor Megatron, and
idles without using CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

from adaptra_megatron.transport import control
from adaptra_megatron.transport._ring import Ring, die_with_parent
from adaptra_megatron.transport.control import (
    ControlEndedError,
    Counters,
    Down,
    Message,
    Open,
    Ping,
    Pong,
    Report,
    Start,
    Stop,
)
from adaptra_megatron.transport.gate import Gate
from adaptra_megatron.transport.handshake import HandshakeError, Purpose, Refusal
from adaptra_megatron.transport.link_session import LinkSession
from adaptra_megatron.transport.socket_io import wait_readable

logger = logging.getLogger("adaptra_megatron.transport.delegate")


class Delegate:
    """Does what its training process asks for over the control socket, until that ends."""

    def __init__(self, channel: socket.socket, start: Start, listeners: list[socket.socket]) -> None:
        self._channel, self._start, self._listeners = channel, start, listeners
        self._links: dict[int, LinkSession] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._gate = Gate(bytes.fromhex(start.secret), start.handshake_s, self._admit)

    async def serve(self) -> None:
        """Returns when asked to stop. Raises ControlEndedError when the training process is gone."""
        for listener in self._listeners:
            self._gate.listen(listener)
        while True:
            message, descriptors = await _next(self._channel)
            if isinstance(message, Stop):
                self._gate.close()
                await asyncio.gather(*(link.drain(message.drain_s) for link in self._links.values()))
                return
            if isinstance(message, Ping):
                self._tell(Pong(number=message.number), [])
            elif isinstance(message, Report):
                self._tell(self._counters(message.number), [])
            elif isinstance(message, Open):
                self._open(message, descriptors)

    def _open(self, request: Open, descriptors: list[int]) -> None:
        try:
            rings = [Ring.attach(descriptor) for descriptor in descriptors]
        except RuntimeError as cause:  # RingError, or no memory or descriptor
            self._tell(Down(peer=request.peer, session=request.session, cause=str(cause)), [])
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        # Connecting takes time, and other links must not wait for it.
        task = asyncio.ensure_future(self._link(request.peer).open(request, rings))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _admit(self, purpose: Purpose, connection: socket.socket) -> None:
        here = (bytes.fromhex(self._start.pipeline), self._start.stage)
        if (purpose.pipeline, purpose.target) != here:
            raise HandshakeError(Refusal.MISDIRECTED, f"this is stage {self._start.stage}, not {purpose.target}")
        await self._link(purpose.source).admit(purpose, connection)

    def _link(self, peer: int) -> LinkSession:
        if peer not in self._links:
            self._links[peer] = LinkSession(self._start, peer, self._tell)
        return self._links[peer]

    def _counters(self, number: int) -> Counters:
        traffic = [link.traffic() for link in self._links.values()]
        return Counters(
            number=number,
            refused={refusal.value: count for refusal, count in self._gate.refused.items()},
            sent_nbytes=sum(link.sent_nbytes for link in traffic),
            received_nbytes=sum(link.received_nbytes for link in traffic),
        )

    def _tell(self, message: Message, descriptors: list[int]) -> None:
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
        assert isinstance(start, Start), f"{start} came first"
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        await Delegate(channel, start, listeners).serve()


def main(arguments: list[str]) -> None:
    """The process, with the descriptor of its control socket and its parent's process id as arguments.

    Ends by `os._exit`: pumps in the middle of a transfer are nobody's business any more.
    """
    control_fd, parent = map(int, arguments)
    die_with_parent(parent)
    logging.basicConfig(level=logging.WARNING, format="adaptra delegate: %(message)s")
    try:
        asyncio.run(_run(socket.socket(fileno=control_fd)))
    except Exception:
        logger.exception("stopped by a bug")
        os._exit(1)
    os._exit(0)
