# SPDX-License-Identifier: Apache-2.0
"""Ends of a session over several TCP connections: the peer's doing, or something between the hosts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from adaptra_megatron.transport._ring import PEER_ENDED, Inbox, PumpCounters, Ring, send_frames
from adaptra_megatron.transport.delegate.delegate_control import OpenLink
from adaptra_megatron.transport.delegate.link_session import _unconnected
from adaptra_megatron.transport.wires import tcp_wire as tcp
from adaptra_megatron.transport.wires.tcp_wire import TcpWire

ENDING_S = 0.3
LANES, SLOTS = 3, 4


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ENDING_S", ENDING_S)


@pytest.fixture
def lanes() -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """Connected pairs: the wire's ends, the peer's ends."""
    ours, theirs = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(LANES):
            theirs.append(socket.create_connection(listener.getsockname()))
            ours.append(listener.accept()[0])
    yield ours, theirs
    for connection in (*ours, *theirs):
        connection.close()


def causes(ours: list[socket.socket], inbound: Ring, happen: Callable[[], None], within_s: float = 10.0) -> list[str]:
    """Why the wire says that the session ended, once something has happened on its connections; empty if it says
    nothing for `within_s`."""

    async def session() -> list[str]:
        found: list[str] = []
        wire = TcpWire(Ring.create(SLOTS, 4096), inbound, max_message_nbytes=1 << 20, stall_s=5.0)
        await wire.begin(ours, found.append)
        happen()
        until_s = time.monotonic() + within_s
        while not found and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        before = list(found)
        await wire.stop()
        return before

    return asyncio.run(session())


def end(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def test_one_connection_that_ends_while_others_live_ends_the_session(lanes: tuple) -> None:
    ours, theirs = lanes
    (cause,) = causes(ours, Ring.create(SLOTS, 4096), lambda: end(theirs[1]))
    assert cause == "1 of 3 connections ended, but the peer did not end them"


def test_it_is_given_the_time_that_the_other_ends_may_take(lanes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ENDING_S", 10.0)
    ours, theirs = lanes
    assert causes(ours, Ring.create(SLOTS, 4096), lambda: end(theirs[1]), 0.3) == []


def test_a_peer_that_ends_all_has_ended_the_session(lanes: tuple) -> None:
    ours, theirs = lanes

    def happen() -> None:
        for connection in theirs:
            end(connection)

    assert causes(ours, Ring.create(SLOTS, 4096), happen) == [PEER_ENDED]


def test_what_was_sent_before_the_end_is_waited_for(lanes: tuple) -> None:
    """A reader that takes its time finds all of it, however long after the end of the other connections."""
    ours, theirs = lanes
    outbound, inbound, count = Ring.create(64, 4096), Ring.create(SLOTS, 4096), 3 * SLOTS
    for number in range(count):
        outbound.write_ack(number, time.monotonic() + 1.0)
    outbound.close()
    assert send_frames(outbound, theirs[0].fileno(), PumpCounters()) == ""
    seen: list[int] = []

    def read_late() -> None:
        inbox = Inbox(max_message_nbytes=0, pooled_nbytes=0)
        time.sleep(2 * ENDING_S)
        while len(seen) < count:
            event = inbox.next(inbound, time.monotonic() + 5.0)
            assert event is not None
            seen.append(event.sequence)

    reader = threading.Thread(target=read_late)

    def happen() -> None:
        for connection in theirs:
            end(connection)
        reader.start()

    assert causes(ours, inbound, happen) == [PEER_ENDED]
    reader.join()
    assert seen == list(range(count))


def test_a_peer_that_has_no_room_is_waited_for(lanes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, say: its kernel answers, and for how long it does so is nothing to a connection."""
    monkeypatch.setattr(tcp, "DEAD_S", 0.2)
    monkeypatch.setattr(tcp, "LOOK_S", 0.05)
    ours, theirs = lanes
    ours[0].settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while True:
            ours[0].send(bytes(1 << 16))
    limits_ms: list[int] = []

    def happen() -> None:
        limits_ms.extend(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in ours)

    assert causes(ours, Ring.create(SLOTS, 4096), happen, 2.0) == []
    assert limits_ms == [0] * LANES, "the kernel would count it all the same"


def test_a_host_that_acknowledges_nothing_ends_the_session(lanes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _theirs = lanes
    monkeypatch.setattr(tcp, "LOOK_S", 0.05)
    monkeypatch.setattr(tcp, "acknowledges", lambda connection, within_s: connection is not ours[1])
    (cause,) = causes(ours, Ring.create(SLOTS, 4096), lambda: None)
    assert cause == "the peer's host has acknowledged nothing for 15 s"


@pytest.mark.parametrize("ended", [True, False])
def test_a_wire_that_is_stopped_looks_no_more(lanes: tuple, ended: bool) -> None:
    ours, theirs = lanes

    async def session() -> list[object]:
        found: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
        inbound = Ring.create(SLOTS, 4096)
        wire = TcpWire(Ring.create(SLOTS, 4096), inbound, max_message_nbytes=1 << 20, stall_s=5.0)
        await wire.begin(ours, found.append)
        if ended:
            end(theirs[1])
            await asyncio.sleep(ENDING_S / 3)
        await wire.stop()
        found.clear()
        await asyncio.sleep(2 * ENDING_S)
        return found

    assert asyncio.run(session()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_lane_takes_a_port_only_when_it_connects(host: str) -> None:
    """One that is taken before is taken for all peers; connections to different peers may have the same."""
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"no {host} here")
    address = list(listener.getsockname()[:2])
    request = OpenLink(peer=1, session=1, transport="tcp", connects=True, address=address, source=host, lanes=1)
    with listener, _unconnected(request) as connection:
        assert connection.getsockname()[:2] == (host, 0)
        connection.setblocking(True)
        connection.connect(listener.getsockname())
        assert connection.getsockname()[0] == host
        assert connection.getsockname()[1] > 0
