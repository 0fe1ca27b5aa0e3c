# SPDX-License-Identifier: Apache-2.0
"""Bring measurements of a replica's ranks to its leader, and its decisions back to all, concurrently with training.

Measurements go to the leader's planner process, over TCP connections of their own. Decisions come back over the same
connections. They are also written to the job's store, where a rank looks only for a decision that is late. All of it
happens in background threads.

A measurement of iteration k leads to a decision during k + 1, which takes effect in k + 2. Planning that takes longer
delays no rank: when the leader's training thread begins an iteration without a decision, it writes that the current
plan stays, and the new plan takes effect later. There is one writer, and it writes the decision of each iteration
once, so no two ranks can run different plans.
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
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import (
    DELAY,
    Decision,
    DecisionWriter,
    MadeDecision,
    RoutingSection,
    decision_of,
)
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar.planner_client import NoDecisionError
from adaptra_megatron.control.sidecar.planner_connections import (
    PLANNER_KEY,
    Address,
    ReportLink,
    address_of,
    purpose_of,
)

LOOK_UP_S = 1.0
"""Seconds that `close` waits for a thread, which may be blocked on the store."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
"""Seconds between two polls of the store, which all ranks share: the first and the longest; each pause is 1.5 times
the one before."""
_PART_NBYTES = 1 << 12
_CLIENT_S = 5.0
"""Shortest time in which the store has to accept a client, however short the limit of messages."""


def decision_key(iteration: int) -> str:
    """Return the store key of an iteration's decision."""
    return f"decision/{iteration}"


def order_key(number: int, cell: str) -> str:
    """Return the store key of the order of one cell ("replica.stage") under the routes `number`."""
    return f"routed/{number}/{cell}"


class PollSchedule:
    """Times to poll the store for a key that is not there yet: at short intervals first, as it may be written soon."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.5)
        self.looked()

    @property
    def rest_s(self) -> float:
        """Seconds until the next poll."""
        return max(0.0, self._next_s - time.monotonic())

    def looked(self) -> None:
        """Schedule the next poll, after one that found nothing."""
        self._pause_s = self._backoff.next_s()
        self._next_s = time.monotonic() + self._pause_s


class DecisionReader:
    """Threads of a rank that is not the leader: they send its measurements and receive decisions.

    Both use one connection to the leader's planner process; its thread sleeps until there is something to send or to
    receive. A second thread polls the job's store, and lives only while the planner's address or a decision that the
    training waits for is missing. So a store that does not answer delays nothing that comes over the connection.
    """

    def __init__(self, control: ControlStore, place: str, layout: JobLayout, timeout_s: float) -> None:
        """Start the threads. `place`: prefix of the exchange's keys in the job's store. `timeout_s`: longest wait for
        a decision. Raises RuntimeError if the store does not accept a client in time."""
        self._store = control.client(place, max(timeout_s, _CLIENT_S))
        self._timeout_s, self._cell = timeout_s, str(layout.cell)
        purpose = purpose_of(control.seal(place).place, layout.rank, layout.leader)
        self._link = ReportLink(control.secret, purpose, DELAY + 1, self._wake)
        self._inbox: queue.SimpleQueue[tuple[int, StageMeasurement]] = queue.SimpleQueue()
        # A socket pair, because the thread sleeps in one poll() for this and for the connection.
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._decisions: dict[int, Decision] = {}
        self._wanted: int | None = None
        """Iteration whose decision the training waits for."""
        self._earliest = 0
        """First iteration whose decision may still be needed."""
        self._polls = PollSchedule()
        self._address: Address | None = None
        """Address of the planner process; None until the leader has published it."""
        self._measured = False
        """Set by the first measurement: from then on the thread polls for the address."""
        self._failure: RuntimeError | None = None
        self._asking = threading.Lock()
        """Guards the store's client."""
        self._poller: threading.Thread | None = None
        self._thread = threading.Thread(target=self._work, name="adaptra-decisions", daemon=True)
        self._thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Send a measurement; returns at once."""
        self._inbox.put((iteration, measurement))
        self._wake()

    def published(self, iteration: int) -> Decision | None:
        """Return the decision of an iteration if it has come; never waits."""
        with self._news:
            return self._decisions.get(iteration)

    def needed(self, iteration: int) -> Decision:
        """Return the decision of an iteration, waiting for it if need be. Decisions of earlier iterations are dropped.

        Raises RuntimeError if the store has failed, TimeoutError if no decision comes within the timeout.
        """
        with self._news:

            def over() -> bool:
                return iteration in self._decisions or self._failure is not None

            if not self._news.wait_for(over, FIRST_PAUSE_S):
                # It may be in the store already, if the connection has failed.
                self._wanted = iteration
                self._begin_polling()
                self._news.wait_for(over, self._timeout_s)
            self._wanted, self._earliest = None, iteration
            # Iterations only ascend: earlier decisions are not asked for again.
            for earlier in [known for known in self._decisions if known < iteration]:
                del self._decisions[earlier]
            if iteration in self._decisions:
                return self._decisions[iteration]
            if self._failure is not None:
                raise self._failure
        raise TimeoutError("nothing was decided")

    def fail(self, cause: RuntimeError) -> None:
        """End all waits for decisions: `needed` raises `cause` from now on. Thread-safe."""
        with self._news:
            self._failure = cause
            self._news.notify_all()

    def close(self) -> None:
        """End the threads. Waits at most 2 x `LOOK_UP_S` for one that the store blocks."""
        self._closed.set()
        self._wake()
        with self._news:
            self._news.notify_all()
        # They are daemon threads: one that the store blocks for good does not keep the process alive.
        until_s = time.monotonic() + 2 * LOOK_UP_S
        for thread in (self._thread, self._poller):
            if thread is not None:
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
                    # The leader publishes its address after its own first measurement: to poll earlier finds nothing.
                    if not self._measured:
                        with self._news:
                            self._measured = True
                            self._begin_polling()
                    self._link.report(iteration, encoded(measurement))
        except RuntimeError as error:
            self.fail(error)
        finally:
            self._link.close()

    def _begin_polling(self) -> None:
        """Poll the store for missing keys, at short intervals at first. The caller holds `_news`."""
        self._polls = PollSchedule()
        self._news.notify_all()
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll_store, name="adaptra-polls", daemon=True)
            self._poller.start()

    def _poll_store(self) -> None:
        """Poll the store until no key is missing, or closed: thousands of ranks must not load the store."""
        try:
            while True:
                with self._news:
                    while self._polling and (rest_s := self._polls.rest_s):
                        self._news.wait(rest_s)
                    if not self._polling:
                        self._poller = None
                        return
                    # A poll counts for the schedule that it began by: a new one may be for another key.
                    polls, wanted = self._polls, self._wanted
                self._poll(wanted)
                polls.looked()
        except RuntimeError as error:
            self.fail(error)

    @property
    def _polling(self) -> bool:
        """Return whether any key has to be polled for."""
        missing = self._wanted is not None or (self._measured and self._address is None)
        return missing and not self._closed.is_set()

    def _wait(self, rest_s: float | None) -> None:
        """Sleep until there is something to send or receive, at most `rest_s`, and take in the decisions received."""
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

    def _poll(self, wanted: int | None) -> None:
        if self._address is None and (found := self._peek(PLANNER_KEY)) is not None:
            self._address = address_of(found)
            self._wake()
        if wanted is not None and (found := self._peek(decision_key(wanted))) is not None:
            self._take(wanted, found)

    def _peek(self, key: str) -> bytes | None:
        with self._asking:
            return self._store.peek(key)

    def _take(self, iteration: int, packet: bytes) -> None:
        """Take in a received decision. Raises RuntimeError if it cannot be read."""
        # A decision may come twice: over the connection and from the store.
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
"""Number of decisions deleted from the store together: requests in a row cost less than one now and then."""


class DecidingPlanner(Protocol):
    """The planner, which makes decisions from the ranks' measurements."""

    @property
    def address(self) -> Address:
        """Address that the other ranks connect to."""

    def decide(self, own: Sequence[tuple[int, bytes]]) -> MadeDecision:
        """Return the decision made from all iterations that all ranks have reported.

        `own`: this rank's measurements since the last call, encoded, with their iterations. The caller logs exceptions
        and keeps the current plan.
        """

    def spread(self, iteration: int, packet: bytes) -> None:
        """Have a sealed decision sent to the other ranks. Thread-safe; never waits."""

    def interject(self, work: Callable[[], object]) -> bool:
        """Have the thread that waits in `decide` call `work` now, and return True; return False if none waits, or it
        cannot. Thread-safe; never waits."""

    def close(self) -> None:
        """End the planner, from another thread, together with a call of `decide` that still waits."""


class DecisionPublisher:
    """The leader's threads: they have the planner decide, and publish the decisions.

    One thread does most of it, because waking another one costs as much as most of the steps. Decisions are made by
    the planner or by the training thread, whichever is first. While the thread waits for the planner, it also publishes
    those of the training thread, which publishes its own at any other time. Neither waits for the job's store: a second
    thread writes to it, and lives only while there is something to write. Other ranks get decisions over their
    connections; a decision with routes only once its orders are in the store.
    """

    def __init__(self, layout: JobLayout, planner: DecidingPlanner, writing: SealedStore, first: int = 0) -> None:
        """Start the thread. `writing`: the exchange's keys in the job's store. `first`: the first measured
        iteration."""
        self._layout, self._planner, self._writing = layout, planner, writing
        self._closed = threading.Event()
        self._failed = RateLimitedLog(logger)
        self._measured: queue.SimpleQueue[tuple[int, StageMeasurement] | None] = queue.SimpleQueue()
        """This rank's measurements; None ends the thread."""
        self._open: deque[int] = deque()
        """Iterations without a decision of the planner."""
        self._kept: deque[int] = deque()
        """Iterations whose decisions are still in the store: some rank may not have read them."""
        self._unpublished: queue.SimpleQueue[tuple[int, Decision, bytes | None]] = queue.SimpleQueue()
        self._publishing = threading.Lock()
        """Guards `_unpublished`: decisions are sent in their order."""
        self._storing = threading.Lock()
        """Guards the following two."""
        self._unstored: deque[Callable[[], object]] = deque()
        """Writes to the store, in their order."""
        self._writer: threading.Thread | None = None
        """The thread that makes them; None if there are none."""
        self._orders: deque[Sequence[str]] = deque()
        """Keys of the orders of recent routes, oldest first."""
        self._lost: RuntimeError | None = None
        """The store's error, if a decision could not be written."""
        self.decisions = DecisionWriter(self._write, first)
        self._thread = threading.Thread(target=self._lead, name="adaptra-lead", daemon=True)
        self._thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Take in this rank's measurement; returns at once."""
        self._measured.put((iteration, measurement))

    def close(self) -> None:
        """End the threads. Waits at most 2 x `LOOK_UP_S` for what is still to be written."""
        self._closed.set()
        self._measured.put(None)
        # Ends a `decide` that waits for reports of other ranks.
        self._planner.close()
        until_s = time.monotonic() + 2 * LOOK_UP_S
        self._thread.join(until_s - time.monotonic())
        if (writer := self._writer) is not None:
            writer.join(max(0.0, until_s - time.monotonic()))

    def _write(self, iteration: int, decision: Decision, packet: bytes | None) -> None:
        if self._lost is not None:
            raise self._lost
        self._unpublished.put((iteration, decision, packet))
        # The thread that has the planner decide publishes its own decisions right after this.
        if threading.current_thread() is not self._thread and not self._planner.interject(self._publish):
            self._publish()

    def _publish(self) -> None:
        """Send all decisions made so far, and queue their writes to the store. Never waits for another process."""
        with self._publishing:
            while not self._unpublished.empty():
                iteration, decision, packet = self._unpublished.get()
                if packet is None:
                    packet = encoded(decision.without_orders())
                if (routing := decision.routing) is not None:
                    self._store_soon(functools.partial(self._put_routed, iteration, routing, packet))
                else:
                    self._planner.spread(iteration, packet)
                    self._store_soon(functools.partial(self._writing.set_parts, decision_key(iteration), packet))

    def _put_routed(self, iteration: int, routing: RoutingSection, packet: bytes) -> None:
        """Write the orders and the decision to the store, then send the decision: a rank that gets it reads its order
        there."""
        self._publish_orders(routing)
        self._writing.set_parts(decision_key(iteration), packet)
        self._writing.check([decision_key(iteration)])  # answered once all before is there: what is set is not
        self._planner.spread(iteration, packet)

    def _store_soon(self, *writes: Callable[[], object]) -> None:
        """Queue writes to the store."""
        with self._storing:
            self._unstored += writes
            if self._writer is None:
                writer = threading.Thread(target=self._store, name="adaptra-storing", daemon=True)
                writer.start()
                self._writer = writer

    def _store(self) -> None:
        """Make the queued writes, until there are none. The first error fails the next decision."""
        while True:
            with self._storing:
                if not self._unstored:
                    self._writer = None
                    return
                write = self._unstored.popleft()
            try:
                write()
            except RuntimeError as error:
                # The next decision raises it: no rank may run what the others cannot read.
                self._lost = error
                log_store_lost(self._layout.rank, error)

    def _publish_orders(self, routing: RoutingSection) -> None:
        """Write the order of each cell; delete those of routes more than DELAY decisions old, which all have read."""
        orders = {order_key(routing.number, cell): order for cell, order in routing.orders.items()}
        for key, order in orders.items():
            self._writing.set_parts(key, order.encode())
        self._orders.append(list(orders))
        if len(self._orders) > DELAY + 1:
            for key in self._orders.popleft():
                self._writing.delete_key(key)

    def _lead(self) -> None:
        try:
            if (own := self._take_in()) is not None:
                # The planner process starts with the first decision, and only then accepts connections: no address
                # before.
                address = encoded(self._planner.address)
                self._store_soon(functools.partial(self._writing.set, PLANNER_KEY, address))
            while own is not None:
                self._decide(own)
                own = self._take_in()
        except RuntimeError as error:
            log_store_lost(self._layout.rank, error)

    def _take_in(self) -> list[tuple[int, bytes]] | None:
        """Return this rank's new measurements, encoded, with their iterations; None to end. Waits for one if every
        iteration has a decision."""
        own: list[tuple[int, bytes]] = []
        # All that there is: after a plan that took long, several iterations are decided on at once.
        while not self._measured.empty() or not (own or self._open):
            if (item := self._measured.get()) is None:
                return None
            iteration, measurement = item
            own.append((iteration, encoded(measurement)))
        self._open += [iteration for iteration, _ in own]
        self._kept += [iteration for iteration, _ in own]
        return own

    def _decide(self, own: Sequence[tuple[int, bytes]]) -> None:
        """Have the planner decide, and publish the decision; if it fails, the current plan stays. Raises RuntimeError
        if the store failed."""
        begun_s, until, packet = time.monotonic(), None, None
        try:
            until, decision, packet = self._planner.decide(own)
        except NoDecisionError as error:
            # `close` ends the planner's call with this error, too.
            if self._closed.is_set():
                return
            decision, until = self.decisions.in_force, error.until
            if str(error):
                self._failed.warning("plan %d stays: %s", decision.number, error)
        except Exception:  # a failure of ours must not stop the training
            decision = self.decisions.in_force
            logger.exception("planning failed, plan %d stays", decision.number)
        # If the planner has failed, nobody knows which reports were complete: all of them count as decided.
        iteration = self._open[-1] if until is None else until
        self.decisions.decided(iteration, decision, packet)
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
        """Delete decisions up to `until` from the store: all ranks have reported that iteration, so have read them."""
        read = bisect.bisect_right(self._kept, until)
        if read < FORGOTTEN_AT_ONCE:
            return
        keys = [decision_key(self._kept.popleft()) for _ in range(read)]
        self._store_soon(*(functools.partial(self._writing.delete_key, key) for key in keys))


def log_store_lost(rank: int, error: RuntimeError) -> None:
    """Log at DEBUG that the store cannot be reached any more."""
    # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
    logger.debug("rank %d lost the job's store: %s", rank, error)


def exchange_place(layout: JobLayout) -> str:
    """Return the prefix, in the job's store, of the keys of all ranks that one leader decides for."""
    return "exchange/all" if layout.together else f"exchange/{layout.cell.replica}"


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan. Names this rank, what it waited for, and the remedy."""


def exchange_error(rank: int, what: str, timeout_s: float | None, cause: Exception) -> ExchangeError:
    """Return the error of `rank`, which could not do `what`. `timeout_s`: None if torch.distributed's own limit
    applied."""
    within = "" if timeout_s is None else f" within {timeout_s:g} s (--adaptra-timeout-s)"
    return ExchangeError(
        f"rank {rank} could not {what}{within}: {cause}. "
        "Another rank has failed, hangs, or cannot be reached; look at the first rank whose log stops"
    )


class PlanExchange:
    """One rank's end of the exchange within its replica. The leader's end runs the planner, in a thread of its own.

    If the leader fails or the store cannot be reached, `decision` raises ExchangeError, after the timeout at the
    latest: no rank can know then which plan the others run. If the order is fixed, the current plan stays for good
    instead: links agree on their paths without the store. If a measurement or the planner is late, or the planner
    fails, the current plan stays for this iteration, and the log says so.
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
        """Start the threads. `planner`: the leader's, closed with this; None on all other ranks. `fixed_order`:
        whether all ranks know the order of actions without decisions (a given plan, or stock's order). `first`: the
        first measured iteration. Raises RuntimeError if the store does not accept a client in time."""
        self._layout, self._timeout_s, self._fixed_order = layout, timeout_s, fixed_order
        self.decides_from = first + DELAY
        """The first iteration that can be decided on."""
        self._latest, self._lost = Decision(0), False
        place = exchange_place(layout)
        self._role: DecisionPublisher | DecisionReader
        self._decisions: DecisionWriter | DecisionReader
        if planner is not None:
            self._role = DecisionPublisher(layout, planner, control.client(place, max(timeout_s, _CLIENT_S)), first)
            self._decisions = self._role.decisions
        else:
            self._role = self._decisions = DecisionReader(control, place, layout, timeout_s)

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Send the measurement of an iteration; returns at once. All ranks do so for all iterations from the first."""
        if not self._lost:
            self._role.post(iteration, measurement)

    def decision(self, iteration: int) -> Decision:
        """Return the decision of `iteration` (`decides_from` or later), the same on every rank of the replica.

        Call in ascending order, each after the measurement of `iteration - DELAY` has been posted. Raises
        ExchangeError.
        """
        assert iteration >= self.decides_from, "nothing has been measured that the first iterations could follow from"
        if self._lost:
            return self._latest.kept()
        try:
            self._latest = self._decisions.needed(iteration)
        except (RuntimeError, TimeoutError) as cause:
            what = f"learn the plan of iteration {iteration}"
            # The other ranks may have this decision: to keep the current plan could deadlock the pipeline.
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
        """Return the decision of `iteration` if it has come; None if not, or if the store failed. Never waits."""
        return None if self._lost else self._decisions.published(iteration)

    def interrupt(self, cause: str) -> None:
        """End a wait in `decision`, which raises ExchangeError. Thread-safe."""
        if isinstance(self._role, DecisionReader):
            self._role.fail(RuntimeError(cause))

    def leave(self) -> None:
        """Stop exchanging: the latest decision stays for good."""
        self._lost = True
        # Not in this thread: the planner's process may need half a second to end.
        threading.Thread(target=self._role.close, name="adaptra-exchange", daemon=True).start()

    def close(self) -> None:
        """End the threads. Queued messages are dropped, and a planner that hangs is left running."""
        self._role.close()
