# SPDX-License-Identifier: Apache-2.0
"""A link in a delegate whose peer opens only some of a session's connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import pytest

from adaptra_megatron.common.handshake import SESSION_NBYTES, Purpose
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.delegate.delegate_control import Down, Message, OpenLink, StartDelegate, Up
from adaptra_megatron.transport.delegate.link_session import LinkSession
from adaptra_megatron.transport.wires.wire_registry import WIRES

LANES = 3
TCP = list(WIRES).index("tcp")
START = StartDelegate(
    rank=1,
    job="00",
    secret="00",
    listeners=["tcp"],
    handshake_s=0.05,
    stall_s=5.0,
    max_message_nbytes=1 << 20,
)
PATIENCE_S = 20.0


class Peer:
    """Connections of stage 0 to a link of stage 1."""

    def __init__(self) -> None:
        self.reported: list[Message] = []
        self.link = LinkSession(START, 0, lambda message, descriptors: self.reported.append(message))
        self.connections: list[socket.socket] = []

    async def connect(self, session: int, lanes: range) -> None:
        """Proven connections, some of those of a session."""
        for lane in lanes:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.connections.append(socket.create_connection(listener.getsockname()))
                theirs, _address = listener.accept()
            self.connections[-1].setblocking(False)
            theirs.setblocking(False)
            await self.link.admit(Purpose(b"", 0, 1, bytes([session] * SESSION_NBYTES), lane, LANES, TCP), theirs)

    async def ask(self, session: int) -> None:
        """The training process of stage 1 asks for the link."""
        request = OpenLink(
            peer=0, session=session, transport="tcp", connects=False, address=["", 0], source="", lanes=LANES
        )
        await self.link.open(request, [Ring.create(2, 4096) for _ in range(2)])

    async def dropped(self) -> None:
        """Returns once the link has ended all connections."""
        for connection in self.connections:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), PATIENCE_S) == b""
        self.connections.clear()


def play(story: Callable[[Peer], Awaitable[None]]) -> None:
    async def run() -> None:
        peer = Peer()
        try:
            await story(peer)
        finally:
            await peer.link.stop()

    asyncio.run(run())


@pytest.mark.parametrize("asked", ["before", "after", "never"])
def test_connections_that_never_become_all_of_a_session_are_dropped(
    asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(peer: Peer) -> None:
        if asked == "before":
            await peer.ask(1)
        await peer.connect(1, range(LANES - 1))
        if asked == "after":
            await peer.ask(1)
        await peer.dropped()
        assert [type(message) for message in peer.reported] == ([] if asked == "never" else [Down])
        await peer.connect(2, range(LANES))
        await peer.ask(2)
        assert isinstance(peer.reported[-1], Up), "the next session does not begin"

    with caplog.at_level(logging.WARNING):
        play(story)
    assert "2 of 3 connections" in caplog.text


def test_a_connection_too_many_is_dropped_and_the_session_stays() -> None:
    async def story(peer: Peer) -> None:
        await peer.ask(1)
        await peer.connect(1, range(LANES))
        in_use, peer.connections = peer.connections, []
        for _ in range(2):
            await peer.connect(1, range(1))
            await peer.dropped()
        assert [type(message) for message in peer.reported] == [Up]
        assert in_use

    play(story)


def test_all_connections_of_a_session_wait_until_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def story(peer: Peer) -> None:
        await peer.connect(1, range(LANES))
        await asyncio.sleep(5 * START.handshake_s)
        await peer.ask(1)
        assert [type(message) for message in peer.reported] == [Up]

    play(story)
    assert not caplog.records


def test_each_connection_has_its_own_time_to_come() -> None:
    async def story(peer: Peer) -> None:
        await peer.ask(1)
        for lane in range(LANES):
            await peer.connect(1, range(lane, lane + 1))
            await asyncio.sleep(1.4 * START.handshake_s)
        assert [type(message) for message in peer.reported] == [Up]

    play(story)
