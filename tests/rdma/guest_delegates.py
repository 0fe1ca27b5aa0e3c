# SPDX-License-Identifier: Apache-2.0
"""Two stages exchange messages through two delegate processes over verbs: one of the delegates is killed, the RNICs do
not reach each other, or none of them does any more.

Runs in the guest of scripts/softroce_vm.py. The stages here are what dual_link.DualLink is, without torch: what has not
arrived is sent again in the next session, and the receiver's inbox drops what comes twice.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy
import pytest
from rails import SLOT_NBYTES, SLOTS, link_down, random_bytes, wait_until, write_message

from adaptra_megatron.transport._ring import Event, Inbox, Ring, RingClosedError
from adaptra_megatron.transport.delegate.delegate_control import OpenLink, StartDelegate
from adaptra_megatron.transport.delegate.supervisor import SupervisedLink, Supervisor
from adaptra_megatron.transport.host_link.host_link_state import GiveUp

LIMIT_S = 90.0
JOB, SECRET = secrets.token_hex(16), secrets.token_hex(32)
MESSAGES = 8


class Stage:
    """One training process, as far as its links go; supervisor.LinkEnd."""

    finished = False

    def __init__(self, number: int, contents: list[numpy.ndarray], rnics: str) -> None:
        self.contents = contents
        self.rnics = rnics.split(",")
        self.received: dict[int, bytes] = {}
        self.times_received: Counter[int] = Counter()
        self.rings: tuple[Ring, Ring] | None = None
        self.sessions = 0
        self.causes: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.number = number
        self.supervisor: Supervisor | None = None
        self._inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=1 << 26)

    def start(self, peer: Stage) -> None:
        start = StartDelegate(
            rank=self.number,
            job=JOB,
            secret=SECRET,
            listeners=["tcp"],
            handshake_s=20.0,
            stall_s=30.0,
            max_message_nbytes=1 << 30,
            rnics=self.rnics,
        )
        request = OpenLink(
            peer=peer.number,
            session=0,
            transport="verbs",
            connects=self.number < peer.number,
            address=list(peer.listener.getsockname()),
            source="",
            lanes=1,
        )
        self.supervisor = Supervisor(
            start, [self.listener], [SupervisedLink(self, request, SLOTS, SLOT_NBYTES)], patience_s=LIMIT_S
        )
        for work in (self._send, self._receive):
            threading.Thread(target=work, args=(peer,), daemon=True).start()

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        self.rings = outbound, inbound
        self.sessions += 1

    def disconnected(self, cause: str) -> None:
        self.rings = None
        self.causes.append(cause)

    def _send(self, peer: Stage) -> None:
        """In each session, all that has not arrived."""
        used = None
        while len(peer.received) < len(self.contents):
            rings = self.rings
            if rings is None or rings is used:
                time.sleep(0.01)
                continue
            used = rings
            try:
                for number, content in enumerate(self.contents):
                    if number not in peer.received:
                        write_message(rings[0], number, content)
            except RingClosedError:
                continue

    def _receive(self, peer: Stage) -> None:
        while len(self.received) < len(peer.contents):
            rings = self.rings
            if rings is None:
                time.sleep(0.01)
                continue
            try:
                event = self._inbox.next(rings[1], time.monotonic() + 0.2)
            except RingClosedError:
                time.sleep(0.01)
                continue
            if event is not None and event.kind == Event.Kind.MESSAGE:
                self.times_received[event.sequence] += 1
                self.received[event.sequence] = bytes(event.payload)


@pytest.fixture
def start_stages() -> Iterator[Callable[..., tuple[Stage, Stage]]]:
    stages: list[Stage] = []

    def start(rnics: tuple[str, str] = ("rxa0,rxb0", "rxa1,rxb1")) -> tuple[Stage, Stage]:
        for number in (0, 1):
            contents = [
                random_bytes(3 * SLOT_NBYTES + 1001 * message, 100 * number + message) for message in range(MESSAGES)
            ]
            stages.append(Stage(number, contents, rnics[number]))
        left, right = stages
        left.start(right)
        right.start(left)
        return left, right

    yield start
    for stage in stages:
        if stage.supervisor is not None:
            stage.supervisor.close()


def wait_for_all(left: Stage, right: Stage) -> None:
    def seen() -> str:
        return str([(stage.sessions, len(stage.received), stage.causes) for stage in (left, right)])

    wait_until(lambda: len(left.received) == len(right.received) == MESSAGES, LIMIT_S, seen)
    for sender, receiver in ((left, right), (right, left)):
        assert set(receiver.times_received.values()) == {1}
        for number, content in enumerate(sender.contents):
            assert receiver.received[number] == content.tobytes(), f"message {number}"


def test_two_stages_exchange_messages(start_stages: Callable[..., tuple[Stage, Stage]]) -> None:
    left, right = start_stages()
    wait_for_all(left, right)
    assert (left.sessions, right.sessions) == (1, 1), left.causes + right.causes
    for stage, other in ((left, right), (right, left)):
        assert stage.supervisor is not None
        counters = stage.supervisor.counters(10.0)
        assert counters is not None
        assert counters.received_nbytes == sum(content.nbytes for content in other.contents)


def overwrite(contents: list[numpy.ndarray]) -> None:
    """Write to all that a forked worker shares with its parent until one of them writes to it."""
    for content in contents:
        content[:] = 0


def test_forked_workers_come_and_go_while_messages_are_under_way(
    start_stages: Callable[..., tuple[Stage, Stage]],
) -> None:
    """As those of data loaders: verbs are in the delegate alone, so no fork touches memory that an RNIC reads."""
    left, right = start_stages()
    forking, codes = multiprocessing.get_context("fork"), []
    while not codes or len(right.received) < MESSAGES:
        workers = [forking.Process(target=overwrite, args=(stage.contents,)) for stage in (left, right)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT_S)
            codes.append(worker.exitcode)
    wait_for_all(left, right)
    assert set(codes) == {0}
    assert (left.sessions, right.sessions) == (1, 1), left.causes + right.causes
    assert transports(left, right) == ["verbs", "verbs"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_delegate_loses_and_doubles_nothing(
    start_stages: Callable[..., tuple[Stage, Stage]], victim: int
) -> None:
    left, right = start_stages()
    wait_until(lambda: len(right.received) >= 2, LIMIT_S, lambda: str(left.causes + right.causes))
    supervisor = (left, right)[victim].supervisor
    assert supervisor is not None
    assert supervisor.process_id is not None
    os.kill(supervisor.process_id, signal.SIGKILL)
    wait_for_all(left, right)
    wait_until(lambda: min(left.sessions, right.sessions) >= 2, LIMIT_S)
    assert supervisor.starts == 2
    assert "SIGKILL" in "".join((left, right)[victim].causes)


def transports(*stages: Stage) -> list[str | None]:
    return [stage.supervisor.transport(1 - stage.number) for stage in stages if stage.supervisor is not None]


def test_rnics_that_do_not_reach_each_other_leave_the_link_to_tcp(
    start_stages: Callable[..., tuple[Stage, Stage]], capfd: pytest.CaptureFixture[str]
) -> None:
    left, right = start_stages(("rxa0", "rxb1"))
    wait_for_all(left, right)
    assert transports(left, right) == ["tcp", "tcp"]
    assert (left.sessions, right.sessions) == (1, 1)
    assert len(left.causes) == 3
    assert all("no RNIC reaches the peer: rxa0: " in cause for cause in left.causes)
    assert capfd.readouterr().err.count("link 0<->1: tcp from now on, as no session over verbs began in 3") == 1


def test_a_link_without_any_rnic_left_goes_on_over_tcp(start_stages: Callable[..., tuple[Stage, Stage]]) -> None:
    left, right = start_stages(("rxa0", "rxa1"))
    wait_until(lambda: len(right.received) >= 1, LIMIT_S, lambda: str(left.causes + right.causes))
    assert transports(left, right) == ["verbs", "verbs"]
    with link_down("va0"):
        wait_until(lambda: left.sessions > 1, LIMIT_S, lambda: str(left.causes + right.causes))
        wait_for_all(left, right)
    assert transports(left, right) == ["tcp", "tcp"]
    assert "no RNIC has reached the peer for" in left.causes[0] + right.causes[0]
