# SPDX-License-Identifier: Apache-2.0
"""However many unauthenticated peers connect, and however fast: few wait at once, and no proven one is refused."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from adaptra_megatron.common import handshake
from adaptra_megatron.common.handshake import MOST_UNPROVEN, Acceptor, HandshakeRefusal, Purpose

SECRET = b"s" * handshake.SECRET_NBYTES
PURPOSE = Purpose(b"p" * 16, 0, 1, b"n" * 16, 0, 1)
TIMEOUT_S = 10.0
"""Longer than any of these tests takes: what is sent away is not sent away by it."""

Admit = Callable[[Purpose, socket.socket], Awaitable[None]]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0adaptra-test-{secrets.token_hex(8)}")
        listening.listen(256)
        yield listening


def knock(listener: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """A connection that says nothing yet."""
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(listener.getsockname())
    connection.setblocking(False)
    return connection


async def until(condition: Callable[[], bool], otherwise: str) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(otherwise)


async def refused_link(purpose: Purpose, connection: socket.socket) -> None:
    raise AssertionError("an intruder was admitted")


def test_a_burst_of_silent_peers_does_not_pass_the_limit(listener: socket.socket) -> None:
    async def run() -> None:
        acceptor = Acceptor(SECRET, TIMEOUT_S, refused_link)
        with contextlib.ExitStack() as stack:
            intruders = 3 * MOST_UNPROVEN
            for _ in range(intruders):  # all wait in the backlog before the first is accepted
                knock(listener, stack)
            acceptor.listen(listener)
            expected = intruders - MOST_UNPROVEN
            await until(
                lambda: acceptor.refused[HandshakeRefusal.HALF_OPEN] >= expected,
                f"only {acceptor.refused} were sent away",
            )
            assert acceptor.refused == {HandshakeRefusal.HALF_OPEN: expected}
            acceptor.close()

    asyncio.run(run())


def test_unauthenticated_peers_of_one_host_do_not_displace_who_comes_from_another() -> None:
    async def run() -> None:
        admitted = asyncio.Event()

        async def admit(purpose: Purpose, connection: socket.socket) -> None:
            connection.close()
            admitted.set()

        acceptor = Acceptor(SECRET, TIMEOUT_S, admit)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
            acceptor.listen(listener)
            address = listener.getsockname()
            far_away = stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
            far_away.setblocking(False)
            await until(lambda: len(acceptor._unproven) == 1, "it was not accepted")
            intruders = 3 * MOST_UNPROVEN
            for _ in range(intruders):
                stack.enter_context(socket.create_connection(address))
            expected = intruders + 1 - MOST_UNPROVEN
            await until(
                lambda: acceptor.refused[HandshakeRefusal.HALF_OPEN] >= expected,
                f"only {acceptor.refused} were sent away",
            )
            await handshake.connect(far_away, SECRET, PURPOSE, TIMEOUT_S)
            await asyncio.wait_for(admitted.wait(), 5.0)
            acceptor.close()

    asyncio.run(run())


def test_unauthenticated_peers_do_not_displace_who_is_proven(listener: socket.socket) -> None:
    async def run() -> None:
        admitted, done = asyncio.Event(), asyncio.Event()
        kept: list[socket.socket] = []

        async def admit(purpose: Purpose, connection: socket.socket) -> None:
            admitted.set()
            await asyncio.sleep(0.3)  # as a session that takes its time to begin
            kept.append(connection)
            done.set()

        acceptor = Acceptor(SECRET, TIMEOUT_S, admit)
        acceptor.listen(listener)
        with contextlib.ExitStack() as stack:
            await handshake.connect(knock(listener, stack), SECRET, PURPOSE, TIMEOUT_S)
            await admitted.wait()
            for _ in range(MOST_UNPROVEN + 1):
                knock(listener, stack)
            await until(
                lambda: acceptor.refused[HandshakeRefusal.HALF_OPEN] == 1,
                f"no intruder was sent away: {acceptor.refused}",
            )
            await asyncio.wait_for(done.wait(), 5.0)
            assert kept[0].fileno() >= 0
            kept[0].close()
            acceptor.close()

    asyncio.run(run())
