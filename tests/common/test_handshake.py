# SPDX-License-Identifier: Apache-2.0
"""Intruders, replays and broken handshakes get nowhere; both sides prove that they know the secret."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.common import handshake
from adaptra_megatron.common.handshake import HandshakeError, HandshakeRefusal, Purpose

SECRET = b"s" * handshake.SECRET_NBYTES
PURPOSE = Purpose(b"p" * 16, 3, 4, b"n" * 16, 1, 4)

Peer = Callable[[socket.socket], Awaitable[Any]]


def meet(one: Peer, other: Peer) -> tuple[Any, Any]:
    """Run both ends of a connection. Their results, or the exceptions that they raised."""

    async def run() -> tuple[Any, Any]:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)

        async def side(peer: Peer, end: socket.socket) -> Any:
            with end:
                return await peer(end)

        return tuple(await asyncio.gather(side(one, ends[0]), side(other, ends[1]), return_exceptions=True))

    return asyncio.run(run())


def accepting(secret: bytes = SECRET, timeout_s: float = 5.0) -> Peer:
    return lambda connection: handshake.accept(connection, secret, timeout_s)


def connecting(secret: bytes = SECRET, timeout_s: float = 5.0) -> Peer:
    return lambda connection: handshake.connect(connection, secret, PURPOSE, timeout_s)


def saying(what: bytes, *, after: int = 0) -> Peer:
    """A peer that reads `after` bytes, says `what` and leaves. Returns what was read and what came afterwards."""

    async def peer(connection: socket.socket) -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        received = await handshake.receive_exactly(connection, after)
        await loop.sock_sendall(connection, what)
        return received, await loop.sock_recv(connection, 1 << 16)

    return peer


def refusal(result: Any) -> HandshakeRefusal:
    assert isinstance(result, HandshakeError), f"no refusal but {result!r}"
    return result.refusal


def recorded() -> tuple[bytes, bytes]:
    """Answer and confirmation of a handshake that succeeded, as an eavesdropper has them."""
    received: list[bytes] = []

    async def relay(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            server = asyncio.ensure_future(handshake.accept(theirs, SECRET, 5.0))
            await loop.sock_sendall(connection, await handshake.receive_exactly(ours, handshake.CHALLENGE_NBYTES))
            received.append(await handshake.receive_exactly(connection, handshake.ANSWER_NBYTES))
            await loop.sock_sendall(ours, received[0])
            received.append(await handshake.receive_exactly(ours, 32))
            await loop.sock_sendall(connection, received[1])
            assert await server == PURPOSE

    results = meet(relay, connecting())
    assert results == (None, None)
    return received[0], received[1]


def test_two_that_know_the_secret_meet() -> None:
    assert meet(accepting(), connecting()) == (PURPOSE, None)


def test_neither_side_accepts_another_secret() -> None:
    server, client = meet(accepting(), connecting(b"x" * 32))
    assert refusal(server) is HandshakeRefusal.WRONG_SECRET
    assert refusal(client) is HandshakeRefusal.HALF_OPEN


def test_a_server_that_only_repeats_is_not_believed() -> None:
    """It can play a recorded challenge and confirmation: the client's nonce is fresh."""
    _answer, confirmation = recorded()
    challenge = b"adaptra\n" + handshake.VERSION.to_bytes(4, "little") + b"c" * 32

    async def server(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, challenge)
        await handshake.receive_exactly(connection, handshake.ANSWER_NBYTES)
        await loop.sock_sendall(connection, confirmation)

    _, client = meet(server, connecting())
    assert refusal(client) is HandshakeRefusal.WRONG_SECRET


def test_a_replayed_answer_is_refused() -> None:
    answer, _confirmation = recorded()
    server, client = meet(accepting(), saying(answer, after=handshake.CHALLENGE_NBYTES))
    assert refusal(server) is HandshakeRefusal.WRONG_SECRET
    assert client[1] == b"", "an intruder got an answer"


def test_a_reflected_proof_is_refused() -> None:
    """Sending the server's own challenge back as an answer."""
    server, client = meet(accepting(), saying(b"\0" * handshake.ANSWER_NBYTES, after=handshake.CHALLENGE_NBYTES))
    assert refusal(server) in (HandshakeRefusal.WRONG_SECRET, HandshakeRefusal.JUNK)
    assert client[1] == b""


@settings(max_examples=30)
@given(st.binary(min_size=0, max_size=4096))
def test_junk_and_oversized_answers_are_refused(junk: bytes) -> None:
    cut_off = len(junk) < handshake.ANSWER_NBYTES
    server, client = meet(accepting(timeout_s=0.3 if cut_off else 10.0), saying(junk))
    expected = (HandshakeRefusal.HALF_OPEN,) if cut_off else (HandshakeRefusal.JUNK, HandshakeRefusal.WRONG_SECRET)
    assert refusal(server) in expected
    if not isinstance(client, BaseException):  # what it received is the challenge, and nothing after it
        assert len(client[1]) <= handshake.CHALLENGE_NBYTES


@pytest.mark.parametrize("changed", range(0, handshake.ANSWER_NBYTES, 5))
def test_every_byte_of_an_answer_counts(changed: int) -> None:
    async def tampering(connection: socket.socket) -> Purpose:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            server = asyncio.ensure_future(handshake.accept(theirs, SECRET, 5.0))
            await loop.sock_sendall(connection, await handshake.receive_exactly(ours, handshake.CHALLENGE_NBYTES))
            answer = bytearray(await handshake.receive_exactly(connection, handshake.ANSWER_NBYTES))
            answer[changed] ^= 0x40
            await loop.sock_sendall(ours, answer)
            return await server

    server, client = meet(tampering, connecting())
    assert refusal(server) in (HandshakeRefusal.WRONG_SECRET, HandshakeRefusal.JUNK)
    assert refusal(client) is HandshakeRefusal.HALF_OPEN


def test_half_open_connections_end_at_the_deadline() -> None:
    async def silent(connection: socket.socket) -> None:
        await asyncio.sleep(0.6)

    for side in (accepting(timeout_s=0.2), connecting(timeout_s=0.2)):
        start_s = time.monotonic()
        result, _ = meet(side, silent)
        assert refusal(result) is HandshakeRefusal.HALF_OPEN
        assert time.monotonic() - start_s < 10.0


@pytest.mark.parametrize(
    ("challenge", "words"),
    [(b"HTTP/1.1 400 Bad Request\r\n" + b" " * 64, "something else"), (b"adaptra\n\x09" + b"\0" * 64, "version 9")],
)
def test_a_client_says_what_is_at_the_address(challenge: bytes, words: str) -> None:
    client, _ = meet(connecting(), saying(challenge))
    assert refusal(client) is HandshakeRefusal.JUNK
    assert words in str(client)
