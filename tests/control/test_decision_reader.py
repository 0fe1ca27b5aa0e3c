# SPDX-License-Identifier: Apache-2.0
"""What a following rank hands in, and by which way decisions come to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from support.made_up.job import SECRET, ControlOver, layout
from support.made_up.measured_job import MeasuredJob
from torch.distributed import HashStore

from adaptra_megatron.common.handshake import accept
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import DELAY, Decision
from adaptra_megatron.control.exchange import DecisionReader, decision_key
from adaptra_megatron.control.sidecar.planner_connections import HEAD, PLANNER_KEY, Address, framed
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

MEASURED = MeasuredJob().measure(1.0)[1]


class PlannerEnd:
    """The other end of a reader's connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.connection, _ = listener.accept()
        self.connection.setblocking(False)
        asyncio.run(accept(self.connection, SECRET, 10.0))
        self.connection.settimeout(10.0)

    def received(self) -> int:
        """The iteration of the next report, which is as it was posted."""
        iteration, nbytes = HEAD.unpack(self.connection.recv(HEAD.size, socket.MSG_WAITALL))
        assert self.connection.recv(nbytes, socket.MSG_WAITALL) == encoded(MEASURED)
        return int(iteration)


@pytest.fixture
def control() -> ControlOver:
    return ControlOver(HashStore())


@pytest.fixture
def reader(control: ControlOver) -> Iterator[DecisionReader]:
    made = DecisionReader(control, "here", layout([[0, 1]], 1), 10.0)
    yield made
    made.close()


@pytest.fixture
def listener(control: ControlOver) -> Iterator[socket.socket]:
    """Where the planner process listens, as the leading rank tells."""
    made, (host, port) = listen_tcp("127.0.0.1")
    made.settimeout(10.0)
    control.client("here").set(PLANNER_KEY, encoded(Address(str(host), int(port))))
    with made:
        yield made


def test_reports_are_handed_in_while_decisions_are_waited_for(reader: DecisionReader, listener: socket.socket) -> None:
    reader.post(0, MEASURED)
    planner = PlannerEnd(listener)
    for iteration in range(3):
        assert planner.received() == iteration, "no decision has come"
        reader.post(iteration + 1, MEASURED)


def test_a_decision_is_passed_on_in_parts_and_needs_no_store(reader: DecisionReader, listener: socket.socket) -> None:
    reader.post(0, MEASURED)
    planner, frames = PlannerEnd(listener), b"".join(framed(each, encoded(Decision(each))) for each in (2, 3))
    planner.connection.sendall(frames[:7])
    assert reader.published(2) is None
    planner.connection.sendall(frames[7:])
    assert [reader.needed(iteration) for iteration in (2, 3)] == [Decision(2), Decision(3)]
    planner.connection.sendall(framed(2, b"what is not needed any more is not looked at"))
    planner.connection.sendall(framed(4, encoded(Decision(4))))
    assert reader.needed(4) == Decision(4)


def test_the_latest_reports_are_handed_in_again_where_another_planner_process_listens(
    reader: DecisionReader, listener: socket.socket
) -> None:
    reader.post(0, MEASURED)
    reader.post(1, MEASURED)
    first = PlannerEnd(listener)
    assert [first.received(), first.received()] == [0, 1]
    first.connection.close()
    reader.post(2, MEASURED)
    second = PlannerEnd(listener)
    assert [second.received(), second.received(), second.received()] == [0, 1, 2]


def test_decisions_come_by_the_store_where_there_is_no_connection(reader: DecisionReader, control: ControlOver) -> None:
    store = control.client("here")
    for iteration in range(DELAY, DELAY + 3):
        reader.post(iteration - DELAY, MEASURED)
        threading.Timer(0.1, store.set, (decision_key(iteration), encoded(Decision(iteration)))).start()
        assert reader.needed(iteration) == Decision(iteration)


def test_a_thread_polls_the_store_only_while_a_key_is_missing(reader: DecisionReader, control: ControlOver) -> None:
    def polls() -> bool:
        return any(thread.name == "adaptra-polls" for thread in threading.enumerate())

    store = control.client("here")
    assert not polls()
    reader.post(0, MEASURED)
    until(polls, "the address is not looked for")
    store.set(PLANNER_KEY, encoded(Address("127.0.0.1", 1)))
    until(lambda: not polls(), "the address is there")
    waiting = threading.Thread(target=reader.needed, args=(DELAY,))
    waiting.start()
    until(polls, "the decision is not looked for")
    store.set(decision_key(DELAY), encoded(Decision(DELAY)))
    waiting.join(10.0)
    assert reader.published(DELAY) == Decision(DELAY)
    until(lambda: not polls(), "the decision is there")


def test_a_connection_that_says_what_cannot_be_is_ended(reader: DecisionReader, listener: socket.socket) -> None:
    reader.post(0, MEASURED)
    planner = PlannerEnd(listener)
    assert planner.received() == 0
    planner.connection.sendall(HEAD.pack(DELAY, (1 << 32) - 1))
    with contextlib.suppress(ConnectionResetError):
        assert planner.connection.recv(1) == b""
    assert PlannerEnd(listener).received() == 0
