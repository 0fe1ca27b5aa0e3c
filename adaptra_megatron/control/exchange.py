# SPDX-License-Identifier: Apache-2.0
"""Bring measurements of a replica's ranks to its leader, and its decisions back to all, concurrently with training.

Measurements go to the leader's planner process, over connections of their own; decisions go into the job's own store,
and back over these connections, so that few ranks need to look there. All of it is done in background threads. What was
measured in iteration k is decided on during k + 1 and takes effect in k + 2. Planning that takes longer holds up no
rank: the leader's own training thread, when it comes to an iteration that nothing was decided for, writes that what
runs is kept, and what is decided later takes effect later. There is one writer, and it writes each iteration's decision
once: no two ranks can run different plans.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import Decision, RoutingSection, decision_of
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar.planner_client import NoDecisionError
from adaptra_megatron.control.sidecar.report_connections import PLANNER_KEY, Address, ReportLink, address_of, purpose_of

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
        """Return the decision of `iteration`, which the training is about to run. Later decisions take effect later."""
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
"""Longest wait for the end of a thread that may be waiting for the store."""
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


logger = logger_of(__name__)

FORGOTTEN_AT_ONCE = 8
"""Decisions that are taken out of the store together: a request after a pause costs several in a row."""


class DecidingPlanner(Protocol):
    """Decides by what ranks report to it."""

    @property
    def address(self) -> Address:
        """Address to which ranks that follow connect."""

    def decide(self, own: Sequence[tuple[int, bytes]]) -> tuple[int, Decision]:
        """The next decision, and the latest iteration that it follows from, once all ranks have reported that. `own`:
        iterations that this rank has measured since the last call, with its reports. What this raises is logged, and
        what runs is kept."""

    def pass_on(self, iteration: int, decision: bytes) -> None:
        """Send a decision to the ranks that follow; for any thread."""

    def close(self) -> None:
        """End, from another thread, also a call that is under way."""


class DecisionPublisher:
    """Has decisions made of what all ranks report and publishes these, in one thread: to wake another one costs as much
    as most of its steps.

    Decisions are made by the planner or the training, whichever comes first. What the training decides while that
    thread waits for the planner, a second one publishes. Nothing waits for the job's store, which a third thread writes
    to: ranks that follow get decisions over their connections, and one with routes once their orders are in the store.
    """

    def __init__(
        self, layout: JobLayout, planner: DecidingPlanner, control: ControlStore, place: str, first: int = 0
    ) -> None:
        """`place`: of the exchange in the job's store. `first`: the first iteration that is measured."""
        self._layout, self._planner, self._writing = layout, planner, control.client(place)
        self._closed = threading.Event()
        self._failed = RateLimitedLog(logger)
        self._measured: queue.SimpleQueue[tuple[int, StageMeasurement] | None] = queue.SimpleQueue()
        """By this rank; None ends."""
        self._open: deque[int] = deque()
        """Iterations that the planner has not decided on yet."""
        self._kept: deque[int] = deque()
        """Iterations whose decisions are still in the store, and whose measurements are not all in."""
        self._unpublished: queue.SimpleQueue[tuple[int, Decision]] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each decision of the training's; False ends."""
        self._publishing = threading.Lock()
        """Has decisions passed on in their order."""
        self._storing: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        """What is to be done with the store; None ends."""
        self._orders: deque[Sequence[str]] = deque()
        """Keys of the latest routes' orders."""
        self._lost: RuntimeError | None = None
        """What the store answered when a decision could not be published."""
        self.decisions = DecisionWriter(self._write, first)
        self._threads = [
            threading.Thread(target=work, name=f"adaptra-{work.__name__.strip('_')}", daemon=True)
            for work in (self._lead, self._publish_urgent, self._store)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Take in what this rank measured, as the others are about to hand theirs in; returns at once."""
        self._measured.put((iteration, measurement))

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._measured.put(None)
        self._urgent.put(False)
        self._planner.close()
        until_s = time.monotonic() + 2 * LOOK_UP_S
        for thread in self._threads:
            if thread is self._threads[-1]:
                self._storing.put(None)  # after all that the others have for it
            thread.join(timeout=max(0.0, until_s - time.monotonic()))

    def _write(self, iteration: int, decision: Decision) -> None:
        if self._lost is not None:
            raise self._lost
        self._unpublished.put((iteration, decision))
        if threading.current_thread() is not self._threads[0]:
            self._urgent.put(True)

    def _publish_urgent(self) -> None:
        while self._urgent.get():
            self._publish()

    def _publish(self) -> None:
        """Pass on all that has been decided by now, and have it put into the store."""
        with self._publishing:
            while not self._unpublished.empty():
                iteration, decision = self._unpublished.get()
                if (routing := decision.routing) is not None:
                    packet = encoded(replace(decision, routing=replace(routing, orders={})))
                    self._storing.put(functools.partial(self._put_routed, iteration, routing, packet))
                else:
                    packet = encoded(decision)
                    self._storing.put(functools.partial(self._writing.set, decision_key(iteration), packet))
                    self._planner.pass_on(iteration, packet)

    def _put_routed(self, iteration: int, routing: RoutingSection, packet: bytes) -> None:
        """Those who get the decision look for their orders in the store."""
        self._publish_orders(routing)
        self._writing.set(decision_key(iteration), packet)
        self._planner.pass_on(iteration, packet)

    def _store(self) -> None:
        """Do what is to be done with the store, in its order."""
        while (work := self._storing.get()) is not None:
            try:
                work()
            except RuntimeError as error:
                self._lost = error
                log_store_lost(self._layout.rank, error)

    def _publish_orders(self, routing: RoutingSection) -> None:
        """Those of DELAY decisions before have been read: ranks run what is decided."""
        orders = {order_key(routing.number, cell): order for cell, order in routing.orders.items()}
        for key, order in orders.items():
            self._writing.set(key, order.encode())
        self._orders.append(list(orders))
        if len(self._orders) > DELAY + 1:
            for key in self._orders.popleft():
                self._writing.delete_key(key)

    def _lead(self) -> None:
        try:
            if (own := self._take_in()) is not None:
                # Not earlier: the planner process, which starts with the first decision, greets those that connect.
                address = encoded(self._planner.address)
                self._storing.put(functools.partial(self._writing.set, PLANNER_KEY, address))
            while own is not None:
                self._decide(own)
                own = self._take_in()
        except RuntimeError as error:
            log_store_lost(self._layout.rank, error)

    def _take_in(self) -> list[tuple[int, bytes]] | None:
        """All that this rank has measured; waits for it if nothing else is to be decided on. None: to end."""
        own: list[tuple[int, bytes]] = []
        while not self._measured.empty() or not (own or self._open):
            if (item := self._measured.get()) is None:
                return None
            iteration, measurement = item
            own.append((iteration, encoded(measurement)))
        self._open += [iteration for iteration, _ in own]
        self._kept += [iteration for iteration, _ in own]
        return own

    def _decide(self, own: Sequence[tuple[int, bytes]]) -> None:
        """Raises RuntimeError if the store is lost."""
        begun_s, until = time.monotonic(), None
        try:
            until, decision = self._planner.decide(own)
        except NoDecisionError as error:
            if self._closed.is_set():
                return
            decision, until = self.decisions.in_force, error.until
            if str(error):
                self._failed.warning("plan %d stays: %s", decision.number, error)
        except Exception:  # a failure of ours must not stop the training
            decision = self.decisions.in_force
            logger.exception("planning failed, plan %d stays", decision.number)
        iteration = self._open[-1] if until is None else until
        self.decisions.decided(iteration, decision)
        self._publish()
        if until is not None:
            self._forget(until)
        count = sum(each <= iteration for each in self._open)
        for _ in range(count):
            self._open.popleft()
        if count > 1:
            logger.debug("caught up with %d iterations at once", count)
        logger.debug("decided on iteration %d in %.1f ms", iteration, 1e3 * (time.monotonic() - begun_s))

    def _forget(self, until: int) -> None:
        """A rank that has reported an iteration has read what that was to run."""
        read = bisect.bisect_right(self._kept, until)
        if read < FORGOTTEN_AT_ONCE:
            return
        for _ in range(read):
            self._storing.put(functools.partial(self._writing.delete_key, decision_key(self._kept.popleft())))


def log_store_lost(rank: int, error: RuntimeError) -> None:
    """Log at DEBUG that the store cannot be reached any more."""
    # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
    logger.debug("rank %d lost the job's store: %s", rank, error)


def exchange_place(layout: JobLayout) -> str:
    """Part of the job's store in which those who are decided for together exchange measurements and decisions."""
    return "exchange/all" if layout.together else f"exchange/{layout.cell.replica}"


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan; names this rank, what it waited for, and the remedy."""


def exchange_error(rank: int, what: str, timeout_s: float | None, cause: Exception) -> ExchangeError:
    """The error of `rank`, which could not do `what`; `timeout_s`: None where torch.distributed's limit counts."""
    within = "" if timeout_s is None else f" within {timeout_s:g} s (--adaptra-timeout-s)"
    return ExchangeError(
        f"rank {rank} could not {what}{within}: {cause}. "
        "Another rank died, hangs, or cannot be reached; look at the first rank whose log stops"
    )


class PlanExchange:
    """One rank's end of the exchange within its replica, whose leader has a planner decide, in a thread of its own.

    When the leader dies or the store cannot be reached, `decision` raises ExchangeError, after the timeout at the
    latest: no rank can know what the others run then. Where the order is fixed, what runs is kept for good instead:
    ends of links need no store to agree on their paths. When another rank is late with what it measured, or the planner
    is late or fails, what runs is kept, and the log says so.
    """

    def __init__(
        self,
        control: ControlStore,
        layout: JobLayout,
        planner: DecidingPlanner | None,
        timeout_s: float,
        *,
        fixed_order: bool = False,
        first: int = 0,
    ) -> None:
        """`planner`: of the leader, closed with this; None on all other ranks. `fixed_order`: whether the order of
        actions is given, or stock's, so that all ranks know it without decisions. `first`: the first iteration that is
        measured."""
        self._layout, self._timeout_s, self._fixed_order = layout, timeout_s, fixed_order
        self.decides_from = first + DELAY
        """The first iteration that can be decided on."""
        self._latest, self._lost = Decision(0), False
        place = exchange_place(layout)
        self._role: DecisionPublisher | DecisionReader
        self._decisions: DecisionWriter | DecisionReader
        if planner is not None:
            self._role = DecisionPublisher(layout, planner, control, place, first)
            self._decisions = self._role.decisions
        else:
            self._role = self._decisions = DecisionReader(control, place, layout, timeout_s)

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured; returns at once. Every rank must do so for every iteration from the first."""
        if not self._lost:
            self._role.post(iteration, measurement)

    def decision(self, iteration: int) -> Decision:
        """Return what `iteration` (`decides_from` or later) runs: the same on every rank of the replica.

        To be asked for in ascending order, each after what was measured DELAY iterations before has been handed in.
        """
        assert iteration >= self.decides_from, "nothing has been measured that the first iterations could follow from"
        if self._lost:
            return self._latest.kept()
        try:
            self._latest = self._decisions.needed(iteration)
        except (RuntimeError, TimeoutError) as cause:
            what = f"learn the plan of iteration {iteration}"
            if not self._fixed_order:
                raise exchange_error(self._layout.rank, what, self._timeout_s, cause) from cause
            self._lost = True
            logger.warning(
                "rank %d could not %s: %s. The order is fixed and stays; no path is chosen any more, and a link "
                "changes its path only when one fails",
                *(self._layout.rank, what, cause),
            )
            return self._latest.kept()
        return self._latest

    def early_decision(self, iteration: int) -> Decision | None:
        """The same if it has been made already; never waits. None, too, while the store does not answer."""
        return None if self._lost else self._decisions.published(iteration)

    def interrupt(self, cause: str) -> None:
        """End a wait for a decision, from any thread: it raises ExchangeError."""
        if isinstance(self._role, DecisionReader):
            self._role.fail(RuntimeError(cause))

    def leave(self) -> None:
        """Exchange nothing any more: what was decided last is kept for good."""
        self._lost = True
        # Not in this thread: the planner's process may need half a second to end.
        threading.Thread(target=self._role.close, name="adaptra-exchange", daemon=True).start()

    def close(self) -> None:
        """End the threads; what is under way is dropped. A planner that hangs is left to itself."""
        self._role.close()
