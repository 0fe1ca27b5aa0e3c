# SPDX-License-Identifier: Apache-2.0
"""A following rank's end of the exchange, in a thread of its own, which never asks the job's store for anything
itself."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.job.control_store import ControlStore
from adaptra_megatron.common.job.layout import JobLayout
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.beside.report_link import ReportLink
from adaptra_megatron.control.beside.report_server import purpose_of
from adaptra_megatron.control.decisions import Decision, decision_of
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.rounds import PLANNER_KEY, Address, address_of

# Sees to it that every iteration has exactly one decision, and that none waits for it.

DELAY = 2
"""Iterations from a measurement to the first iteration that its decision can change."""


class DecisionWriter:
    """The leader's. The first to come writes: the planner, or the training that needs a decision now.

    A decision that comes too late for its iteration waits for the next one that nothing was written for. An iteration
    is decided on only after it was needed: what has not run is not measured.
    """

    def __init__(self, write: Callable[[int, Decision], None], first: int = 0) -> None:
        """`write(iteration, decision)` publishes, once per iteration, in ascending order; may raise RuntimeError.
        `first`: the first iteration that is measured."""
        self._write = write
        self._lock = threading.Lock()
        self._next = first + DELAY
        """The first iteration that nothing has been written for."""
        self._latest = Decision(0)
        self._waiting: Decision | None = None
        self._recent: dict[int, Decision] = {}

    @property
    def in_force(self) -> Decision:
        """Decision in force if no new one comes."""
        with self._lock:
            return (self._waiting or self._latest).kept()

    def decided(self, iteration: int, decision: Decision) -> None:
        """`decision` is what follows from all that was measured up to `iteration`."""
        with self._lock:
            self._waiting = decision if self._waiting is None else self._waiting.then(decision)
            while self._next <= iteration + DELAY:
                self._write_next()

    def needed(self, iteration: int) -> Decision:
        """The training is about to run `iteration`: what is not decided by now takes effect later."""
        with self._lock:
            while self._next <= iteration:
                self._write_next()
            return self._recent[iteration]

    def published(self, iteration: int) -> Decision | None:
        """The decision of one of the latest iterations, if there is one."""
        with self._lock:
            return self._recent.get(iteration)

    def _write_next(self) -> None:
        decision = self._latest.kept() if self._waiting is None else self._waiting
        self._write(self._next, decision)
        self._waiting, self._latest = None, decision
        self._recent[self._next] = decision
        self._recent.pop(self._next - 2 * DELAY, None)
        self._next += 1


LOOK_UP_S = 1.0
"""How long a thread that asks the store, and is to end, is waited for."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
"""Between two looks into the store, which all ranks share; each is half as long again as the one before."""
_PART_NBYTES = 1 << 12


def decision_key(iteration: int) -> str:
    """Under which the decision of an iteration is in the store."""
    return f"decision/{iteration}"


def order_key(number: int, cell: str) -> str:
    """Under which the order of a cell ("replica.stage") under the routes of this number is."""
    return f"routed/{number}/{cell}"


class PollSchedule:
    """Moments at which to look again for what is not in the store yet."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Look often from now on: what is looked for may come soon."""
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.5)
        self.looked()

    @property
    def rest_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._next_s - time.monotonic())

    def looked(self) -> None:
        """Look later: it was not there."""
        self._pause_s = self._backoff.next_s()
        self._next_s = time.monotonic() + self._pause_s


class DecisionReader:
    """A following rank's threads: hand in what was measured, and take in decisions.

    Both go by a connection to the leading rank's planner process, so that one thread is woken when there is something
    to do, and looks for nothing. Only what the training waits for, and has not come, is looked for in the job's store,
    which has all decisions, by another thread: a store that does not answer holds up nothing that comes otherwise.
    """

    def __init__(self, control: ControlStore, place: str, layout: JobLayout, timeout_s: float) -> None:
        """`place`: of the exchange in the job's store. `timeout_s`: how long a decision may be waited for."""
        self._store, self._timeout_s, self._cell = control.client(place), timeout_s, str(layout.cell)
        purpose = purpose_of(control.seal(place).place, layout.rank, layout.leader)
        self._link = ReportLink(control.secret, purpose, DELAY + 1, self._wake)
        self._inbox: queue.SimpleQueue[tuple[int, StageMeasurement]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._decisions: dict[int, Decision] = {}
        self._wanted: int | None = None
        """Iteration whose decision the training waits for."""
        self._earliest = 0
        """First iteration whose decision may still be needed."""
        self._looks = PollSchedule()
        self._address: Address | None = None
        """Address of the planner process, once the leading rank has told it."""
        self._measured = False
        """Set by the first report: from then on the address is looked for."""
        self._failure: RuntimeError | None = None
        self._asking = threading.Lock()
        """Guards the client of the store."""
        self._threads = [
            threading.Thread(target=self._work, name="adaptra-decisions", daemon=True),
            threading.Thread(target=self._look_around, name="adaptra-looks", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured; returns at once."""
        self._inbox.put((iteration, measurement))
        self._wake()

    def published(self, iteration: int) -> Decision | None:
        """The decision of an expected iteration, if it is here; never waits."""
        with self._news:
            return self._decisions.get(iteration)

    def needed(self, iteration: int) -> Decision:
        """The decision of an expected iteration; earlier ones are forgotten.

        Raises RuntimeError if the store has failed, TimeoutError if it holds no decision until the timeout.
        """
        with self._news:
            if iteration not in self._decisions:
                self._wanted = iteration
                self._looks.begin()
                self._news.notify_all()
            self._news.wait_for(lambda: iteration in self._decisions or self._failure is not None, self._timeout_s)
            self._wanted, self._earliest = None, iteration
            for earlier in [known for known in self._decisions if known < iteration]:
                del self._decisions[earlier]
            if iteration in self._decisions:
                return self._decisions[iteration]
            if self._failure is not None:
                raise self._failure
        raise TimeoutError("nothing was decided")

    def fail(self, cause: RuntimeError) -> None:
        """Let no decision be waited for any more: `needed` raises `cause`. For any thread."""
        with self._news:
            self._failure = cause
            self._news.notify_all()

    def close(self) -> None:
        """End the threads; one that the store holds up, after twice `LOOK_UP_S`."""
        self._closed.set()
        self._wake()
        with self._news:
            self._news.notify_all()
        until_s = time.monotonic() + 2 * LOOK_UP_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not woken up to many others yet
            self._waker.send(b"+")

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._wait(None if self._address is None else self._link.keep(self._address))
                while not self._inbox.empty():
                    iteration, measurement = self._inbox.get()
                    if not self._measured:
                        with self._news:
                            self._measured = True
                            self._looks.begin()
                            self._news.notify_all()
                    self._link.report(iteration, encoded(measurement))
        except RuntimeError as error:
            self.fail(error)
        finally:
            self._link.close()

    def _look_around(self) -> None:
        """Look into the store for what is wanted, and has not come."""
        try:
            while not self._closed.is_set():
                with self._news:
                    while not (self._closed.is_set() or (self._looking and not self._looks.rest_s)):
                        self._news.wait(self._looks.rest_s if self._looking else None)
                if not self._closed.is_set():
                    self._look()
        except RuntimeError as error:
            self.fail(error)

    @property
    def _looking(self) -> bool:
        """Return whether there is anything to look for in the store."""
        return self._wanted is not None or (self._measured and self._address is None)

    def _wait(self, rest_s: float | None) -> None:
        """Sleep until there is something to do, for `rest_s` at most, and take in the decisions that came."""
        connection, waiting = self._link.connection, select.poll()
        waiting.register(self._woken, select.POLLIN)
        if connection is not None:
            waiting.register(connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll(None if rest_s is None else 1e3 * rest_s)}
        if self._woken.fileno() in ready:
            self._woken.recv(_PART_NBYTES)
        if connection is not None and connection.fileno() in ready:
            for iteration, packet in self._link.receive():
                self._take(iteration, packet)

    def _look(self) -> None:
        if self._address is None and (found := self._peek(PLANNER_KEY)) is not None:
            self._address = address_of(found)
            self._wake()
        if (wanted := self._wanted) is not None and (found := self._peek(decision_key(wanted))) is not None:
            self._take(wanted, found)
        self._looks.looked()

    def _peek(self, key: str) -> bytes | None:
        with self._asking:
            return self._store.peek(key)

    def _take(self, iteration: int, packet: bytes) -> None:
        """Take in a decision that has come. Raises RuntimeError if it cannot be read."""
        if iteration < self._earliest or iteration in self._decisions:
            return
        try:
            decision = decision_of(packet)
        except ValueError as cause:
            raise RuntimeError(f"the decision of iteration {iteration} cannot be read: {cause}") from cause
        routing = decision.routing
        if routing is not None and routing.number:
            order = self._peek(order_key(routing.number, self._cell))  # put there before the decision
            if order is None:
                raise RuntimeError(
                    f"the decision of iteration {iteration} has routes without an order for {self._cell}"
                )
            decision = replace(decision, routing=replace(routing, orders={self._cell: order.decode()}))
        with self._news:
            self._decisions[iteration] = decision
            if self._wanted == iteration:
                self._wanted = None
            self._news.notify_all()
