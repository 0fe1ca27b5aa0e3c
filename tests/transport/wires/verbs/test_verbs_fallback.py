# SPDX-License-Identifier: Apache-2.0
"""A link that is to use verbs, between real delegates on a host without RDMA devices: both ends come to use tcp."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator

import numpy
import pytest

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox, Ring
from adaptra_megatron.transport.delegate.delegate_control import OpenLink, StartDelegate
from adaptra_megatron.transport.delegate.supervisor import SupervisedLink, Supervisor
from adaptra_megatron.transport.host_link.host_link_state import GiveUp
from adaptra_megatron.transport.wires.verbs.verbs_device import why_unavailable
from testing.waiting import until

LIMIT_S = 30.0
JOB, SECRET = secrets.token_hex(16), secrets.token_hex(32)
NOTICE = "link 0<->1: tcp from now on, as no session over verbs began in 3 attempts"


class Stage:
    """One training process, as far as its link goes; supervisor.LinkEnd."""

    finished = False

    def __init__(self, number: int, lanes: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.rings: tuple[Ring, Ring] | None = None
        self.sessions = 0
        self.causes: list[str] = []
        self._number, self._lanes = number, lanes

    def start(self, peer: Stage) -> None:
        start = StartDelegate(
            rank=self._number,
            job=JOB,
            secret=SECRET,
            listeners=["tcp"],
            handshake_s=5.0,
            stall_s=5.0,
            max_message_nbytes=1 << 20,
        )
        request = OpenLink(
            peer=1 - self._number,
            session=0,
            transport="verbs",
            connects=self._number == 0,
            address=list(peer.listener.getsockname()),
            source="",
            lanes=self._lanes,
        )
        self.supervisor = Supervisor(start, [self.listener], [SupervisedLink(self, request, 4, 4096)])

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        self.rings = outbound, inbound
        self.sessions += 1

    def disconnected(self, cause: str) -> None:
        self.rings = None
        self.causes.append(cause)

    def say(self, sequence: int) -> None:
        assert self.rings is not None
        content = numpy.arange(10000, dtype=numpy.uint16)
        description = Description(
            sequence=sequence,
            iteration=0,
            direction=0,
            chunk=0,
            micro_batch=sequence,
            dtype=DATA_TYPES["uint16"],
            shape=[content.size],
        )
        self.rings[0].write(description, content.ctypes.data, content.nbytes, time.monotonic() + LIMIT_S)

    def receive(self) -> int:
        assert self.rings is not None
        inbox = Inbox(max_message_nbytes=1 << 20, pooled_nbytes=0)
        event = inbox.next(self.rings[1], time.monotonic() + LIMIT_S)
        assert event is not None
        assert event.kind == Event.Kind.MESSAGE
        assert bytes(event.payload) == numpy.arange(10000, dtype=numpy.uint16).tobytes()
        return event.sequence


@pytest.fixture
def start_stages() -> Iterator[Callable[[int], tuple[Stage, Stage]]]:
    """To be called in the test: what pytest captures while setting up is kept elsewhere."""
    stages: list[Stage] = []

    def start(lanes: int) -> tuple[Stage, Stage]:
        stages.extend(Stage(number, lanes) for number in range(2))
        left, right = stages
        left.start(right)
        right.start(left)
        return left, right

    yield start
    for stage in stages:
        stage.supervisor.close()


@pytest.mark.skipif(why_unavailable([]) is None, reason="this host has RDMA devices")
@pytest.mark.parametrize("lanes", [1, 3])
def test_what_does_not_begin_over_verbs_falls_to_tcp_once_and_for_good(
    start_stages: Callable[[int], tuple[Stage, Stage]], capfd: pytest.CaptureFixture[str], lanes: int
) -> None:
    left, right = start_stages(lanes)

    def causes() -> list[str]:
        return left.causes + right.causes

    until(lambda: left.rings is not None and right.rings is not None, causes, LIMIT_S)
    assert (left.supervisor.transport(1), right.supervisor.transport(0)) == ("tcp", "tcp")
    assert len(left.causes) >= 3, causes()
    assert left.causes[-1] == why_unavailable([])
    for sender, receiver in ((left, right), (right, left)):
        sender.say(0)
        assert receiver.receive() == 0
    for victim in (left, right):
        sessions, process_id = left.sessions, victim.supervisor.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        until(lambda sessions=sessions: left.sessions > sessions and left.rings is not None, causes, LIMIT_S)
        assert left.supervisor.transport(1) == "tcp"
    assert capfd.readouterr().err.count(NOTICE) == 1
