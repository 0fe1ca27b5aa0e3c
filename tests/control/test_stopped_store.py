# SPDX-License-Identifier: Apache-2.0
"""A job's store that stops answering holds up no training thread."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.made_up.job import SECRET, ControlOver, layout
from support.made_up.measured_job import MeasuredJob
from torch.distributed import HashStore

from adaptra_megatron.common.handshake import accept
from adaptra_megatron.common.sealed_store import MOST_NBYTES
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import (
    DELAY,
    Decision,
    LinkName,
    MadeDecision,
    Paths,
    RoutingSection,
    decision_of,
)
from adaptra_megatron.control.exchange import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    DecisionPublisher,
    DecisionReader,
    PlanExchange,
    PollSchedule,
    decision_key,
    order_key,
)
from adaptra_megatron.control.sidecar.planner_connections import HEAD, PLANNER_KEY, Address, framed
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

WRITES = "adaptra-storing"
"""The leader's thread that writes to the store."""


class Idle:
    """A planner that nothing gets to."""

    address = Address("127.0.0.1", 1)

    def __init__(self) -> None:
        self.passed_on: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """Iterations and numbers of plans."""

    def decide(self, own: Sequence[tuple[int, bytes]]) -> MadeDecision:
        return MadeDecision(own[-1][0], Decision(1), encoded(Decision(1)))

    def spread(self, iteration: int, packet: bytes) -> None:
        self.passed_on.put((iteration, decision_of(packet).number))

    def interject(self, work: Callable[[], object]) -> bool:
        return False

    def close(self) -> None:
        pass


class StoppedStore:
    """A store whose process is stopped: calls do not return before it goes on."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.goes_on = threading.Event()
        self.struck = threading.Event()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def stopped(*arguments: Any) -> Any:
            self.struck.set()
            assert self.goes_on.wait(30.0)
            return call(*arguments)

        return stopped


@pytest.fixture
def stopped() -> Iterator[StoppedStore]:
    store = StoppedStore(HashStore())
    yield store
    store.goes_on.set()


@pytest.mark.parametrize("looks", [False, True], ids=["between-looks", "as-it-looks"])
def test_a_store_is_looked_into_often_once_the_training_waits(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it begins to wait while the store is looked into, for something else."""
    control = ControlOver(HashStore())
    store, reader = control.client("here"), DecisionReader(control, "here", layout([[0, 1]], 1), 10.0)
    (measurement, *_others) = MeasuredJob().measure(1.0)
    peek, looked, paused_s = reader._store.peek, threading.Semaphore(0), []

    def seen(key: str) -> bytes | None:
        if key == PLANNER_KEY and reader._polls._pause_s == LONGEST_PAUSE_S:
            looked.release()
        if key == decision_key(DELAY):
            paused_s.append(reader._polls._pause_s)
            if len(paused_s) == 3:
                store.set(key, encoded(Decision(DELAY)))
        return peek(key)

    counted = PollSchedule.looked

    def late(polls: PollSchedule) -> None:
        if looks and getattr(polls, "_pause_s", 0.0) == LONGEST_PAUSE_S:
            until(lambda: reader._wanted is not None)
        counted(polls)

    monkeypatch.setattr(PollSchedule, "looked", late)
    monkeypatch.setattr(reader._store, "peek", seen)
    reader.post(0, measurement)
    assert looked.acquire(timeout=60.0), "it looks for the planner process's address, ever more seldom"
    assert reader.needed(DELAY).number == DELAY
    reader.close()
    assert paused_s == pytest.approx([FIRST_PAUSE_S, 1.5 * FIRST_PAUSE_S, 1.5**2 * FIRST_PAUSE_S])


def test_a_decision_that_is_passed_on_is_taken_while_the_store_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    control, goes_on, struck = ControlOver(HashStore()), threading.Event(), threading.Event()
    listener, (host, port) = listen_tcp("127.0.0.1")
    listener.settimeout(10.0)
    control.client("here").set(PLANNER_KEY, encoded(Address(str(host), int(port))))
    reader = DecisionReader(control, "here", layout([[0, 1]], 1), 30.0)
    (_own, measurement, *_others) = MeasuredJob().measure(1.0)
    reader.post(0, measurement)
    connection, _ = listener.accept()
    connection.setblocking(False)
    asyncio.run(accept(connection, SECRET, 10.0))
    peek = reader._store.peek

    def stopped(key: str) -> bytes | None:
        struck.set()
        assert goes_on.wait(30.0)
        return peek(key)

    monkeypatch.setattr(reader._store, "peek", stopped)
    taken: list[Decision] = []
    training = threading.Thread(target=lambda: taken.append(reader.needed(DELAY)), daemon=True)
    training.start()
    assert struck.wait(10.0), "the training waits, so the store is looked into"
    connection.setblocking(True)
    connection.sendall(framed(DELAY, encoded(Decision(7))))
    training.join(10.0)
    assert taken == [Decision(7)]
    reader.post(1, measurement)
    connection.settimeout(10.0)
    reported = []
    while len(reported) < 2:
        iteration, nbytes = HEAD.unpack(connection.recv(HEAD.size, socket.MSG_WAITALL))
        connection.recv(nbytes, socket.MSG_WAITALL)
        reported.append(iteration)
    assert reported == [0, 1], "and what is measured is handed in"
    goes_on.set()
    reader.close()
    connection.close()
    listener.close()


def test_neither_the_leader_nor_those_that_follow_wait_for_a_stopped_store(stopped: StoppedStore) -> None:
    planner = Idle()
    control = ControlOver(stopped)
    leader = DecisionPublisher(layout([[0, 1]], 0), planner, control.client("exchange"))
    decided: dict[int, Decision] = {}

    def train() -> None:
        for iteration in range(4):
            leader.post(iteration, MeasuredJob().measure(1.0)[0])
            decided[iteration + DELAY] = leader.decisions.needed(iteration + DELAY)

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(20.0)
    assert stopped.struck.wait(5.0), "the fault did not fire"
    assert len(decided) == 4
    passed_on = dict(planner.passed_on.get(timeout=20.0) for _ in decided)
    assert passed_on == {iteration: decision.number for iteration, decision in decided.items()}, "each once, the same"
    writer = leader._writer
    assert writer is not None, "nothing waits for the store"
    stopped.goes_on.set()
    leader.close()
    for thread in (leader._thread, writer):
        thread.join(15.0)
        assert not thread.is_alive(), "it does not end"
    written = control.client("exchange")
    stored = {iteration: written.peek(decision_key(iteration)) for iteration in decided}
    assert stored == {iteration: encoded(decision) for iteration, decision in decided.items()}, "and all is written"


def test_the_thread_that_writes_to_the_store_lives_while_there_is_something_to_write(stopped: StoppedStore) -> None:
    leader = DecisionPublisher(layout([[0, 1]], 0), Idle(), ControlOver(stopped).client("exchange"))
    for iteration in range(3):
        leader.post(iteration, MeasuredJob().measure(1.0)[0])
        leader.decisions.needed(iteration + DELAY)
        if iteration == 0:
            assert stopped.struck.wait(15.0), "the fault did not fire"
            assert WRITES in {thread.name for thread in threading.enumerate()}
            stopped.goes_on.set()
        until(lambda: WRITES not in {thread.name for thread in threading.enumerate()}, "it stays", 15.0)
    leader.close()


class Unanswered:
    """A client of a store whose writes come after all that others ask, until it asks for something itself."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self._sent: list[tuple[str, bytes]] = []

    def set(self, key: str, value: bytes) -> None:
        self._sent.append((key, value))

    def __getattr__(self, name: str) -> Any:
        while self._sent:
            self._store.set(*self._sent.pop(0))
        return getattr(self._store, name)


def test_orders_are_in_the_store_before_a_decision_that_names_them_is_sent() -> None:
    store, seen = HashStore(), list[bytes | None]()

    class Looking(Idle):
        """A planner process that passes decisions on at once, to ranks that look for their orders."""

        def spread(self, iteration: int, packet: bytes) -> None:
            seen.append(ControlOver(store).client("exchange").peek(order_key(1, "0.0")))

    leader = DecisionPublisher(layout([[0, 1]], 0), Looking(), ControlOver(Unanswered(store)).client("exchange"))
    routing = RoutingSection(number=1, micro_batches=4, orders={"0.0": "an order"})
    leader.decisions.decided(0, Decision(1, routing=routing))
    until(lambda: seen)
    leader.close()
    assert seen[0] == b"an order"


def test_a_decision_that_is_larger_than_one_value_comes_by_the_store() -> None:
    control = ControlOver(HashStore())
    leader = DecisionPublisher(layout([[0, 1]], 0), Idle(), control.client("exchange"))
    reader = DecisionReader(control, "exchange", layout([[0, 1]], 1), 20.0)
    large = Decision(1, paths=Paths(tuple(LinkName(rank, 0, 1) for rank in range(1 << 18))))
    assert len(encoded(large)) > MOST_NBYTES
    leader.decisions.decided(0, large)
    assert reader.needed(DELAY) == large
    reader.close()
    leader.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_answers_no_new_client_holds_up_a_rank_for_its_timeout(rank: int) -> None:
    """A store stops after a failure, as those that live make an exchange of their own: torch's limit is minutes."""
    clients: list[float | None] = []

    class Limited(ControlOver):
        def unsealed(self, place: str, within_s: float | None = None) -> Any:
            clients.append(within_s)
            return super().unsealed(place)

    planner = None if rank else Idle()
    PlanExchange(Limited(HashStore()), layout([[0, 1]], rank), planner, 20.0).close()
    assert clients
    assert set(clients) == {20.0}
