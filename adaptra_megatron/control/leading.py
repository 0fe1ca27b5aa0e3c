# SPDX-License-Identifier: Apache-2.0
"""A leading rank's end of the exchange, in a thread of its own: has decisions made, and publishes them."""

from __future__ import annotations

import bisect
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from adaptra_megatron.common.job.control_store import ControlStore
from adaptra_megatron.common.job.layout import JobLayout
from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decision_reader import DELAY, LOOK_UP_S, DecisionWriter, decision_key, order_key
from adaptra_megatron.control.decisions import Decision, RoutingSection
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.planner_process.planner_keeper import NoDecisionError
from adaptra_megatron.control.rounds import PLANNER_KEY, Address

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
                say_lost(self._layout.rank, error)

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
            say_lost(self._layout.rank, error)

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


def say_lost(rank: int, error: RuntimeError) -> None:
    """The store cannot be reached any more."""
    # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
    logger.debug("rank %d lost the job's store: %s", rank, error)
