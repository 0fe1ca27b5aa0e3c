# SPDX-License-Identifier: Apache-2.0
"""What the leading rank of a replica does beside its training: collects measurements, publishes decisions."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from adaptra_megatron.authentication.seal import TamperedError
from adaptra_megatron.authentication.sealed_store import peek
from adaptra_megatron.control.decision_reader import LOOK_UP_S, Watch, decision_key, order_key
from adaptra_megatron.control.decision_writer import DELAY, DecisionWriter
from adaptra_megatron.control.decisions import Decision, Routing
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.planner_process.keeper import NoDecisionError
from adaptra_megatron.control.rounds import SealedRound, count_key, entry_of, read_round, round_key
from adaptra_megatron.control.wire_format import encoded
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.log import logger_of
from adaptra_megatron.sparing_log import SparingLog

logger = logger_of(__name__)

_MISSED_S = 30.0
"""How long a rank may be behind this one with what it measured before this one says so."""


class Planner(Protocol):
    """What makes decisions."""

    def decide(self, rounds: Sequence[SealedRound]) -> Decision:
        """What follows from all iterations that have been measured since the last call, at least one. What this raises
        is logged, and what runs is kept."""

    def close(self) -> None:
        """End, from another thread, also a call that is under way."""


class Leading:
    """Collects measurements, has decisions made of them and publishes these, in one thread: to wake another one costs
    as much as most of its steps.

    Decisions are made by the planner or the training, whichever comes first. Neither waits for the store: what the
    training decides while that thread waits for the planner, a second one publishes.
    """

    def __init__(self, layout: JobLayout, planner: Planner, control: ControlStore, place: str) -> None:
        """`place`: of the exchange in the job's store."""
        self._layout, self._planner, self._seal = layout, planner, control.seal(place)
        self._collecting, self._writing = control.client(place), control.client(place)
        self._closed = threading.Event()
        self._failed = SparingLog(logger)
        self._watch = Watch(self._closed)
        self._measured: queue.SimpleQueue[tuple[int, StageMeasurement] | None] = queue.SimpleQueue()
        """By this rank; None ends."""
        self._open: deque[tuple[int, bytes]] = deque()
        """Iterations that are to be collected, with this rank's entry: packed before the others' are fetched, which
        caches forget it over."""
        self._unpublished: queue.SimpleQueue[tuple[int, Decision]] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each decision of the training's; False ends."""
        self._publishing = threading.Lock()
        """Guards the client that writes, and the latest routes."""
        self._orders: deque[Sequence[str]] = deque()
        """Keys of the latest routes' orders."""
        self._lost: RuntimeError | None = None
        """What the store answered when a decision could not be published."""
        self.decisions = DecisionWriter(self._write)
        self._threads = [
            threading.Thread(target=work, name=f"adaptra-{work.__name__.strip('_')}", daemon=True)
            for work in (self._lead, self._publish_urgent)
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
        """All that has been decided, by now."""
        with self._publishing:
            while not self._unpublished.empty():
                iteration, decision = self._unpublished.get()
                try:
                    if (routing := decision.routing) is not None:
                        self._publish_orders(routing)
                        decision = replace(decision, routing=replace(routing, orders={}))
                    self._writing.set(decision_key(iteration), encoded(decision))
                except RuntimeError as error:
                    self._lost = error
                    say_lost(self._layout.rank, error)

    def _publish_orders(self, routing: Routing) -> None:
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
            while self._take_in() and (rounds := self._collect()):
                self._decide(rounds)
        except RuntimeError as error:
            say_lost(self._layout.rank, error)

    def _take_in(self) -> bool:
        """All that this rank has measured; waits for it if there is nothing else to collect. False: to end."""
        while not self._open or not self._measured.empty():
            if (item := self._measured.get()) is None:
                return False
            self._open.append((item[0], entry_of(self._seal, *item)))
        return True

    def _collect(self) -> list[SealedRound]:
        """The earliest iteration that is to be collected, once all have handed in, and those after it that are there
        as well; none if this is to end. Raises RuntimeError if the store is lost."""
        rounds: list[SealedRound] = []
        while self._open:
            iteration, own = self._open[0]
            found = self._look(iteration) if rounds else self._awaited(iteration)
            if found is None:
                break
            rounds.append(SealedRound(iteration, found, own))
            self._open.popleft()
            # A rank that has handed in its measurement of an iteration has read what that was to run.
            for done in (round_key(iteration), count_key(iteration), decision_key(iteration)):
                self._collecting.delete_key(done)
        return rounds

    def _look(self, iteration: int) -> bytes | None:
        """What all others have measured; None if one has not handed it in yet."""
        handed_in = peek(self._collecting, count_key(iteration)) or b""
        return self._entries(iteration) if len(handed_in) >= len(self._layout.reporters) - 1 else None

    def _entries(self, iteration: int) -> bytes:
        return peek(self._collecting, round_key(iteration)) or b""

    def _awaited(self, iteration: int) -> bytes | None:
        """The same, once it is there; None if this is to end."""
        found = self._watch.wait(lambda: self._look(iteration), _MISSED_S, late=len(self._open) > 1)
        if found is None and not self._closed.is_set():
            self._say_missed(iteration, self._entries(iteration))
            found = self._watch.wait(lambda: self._look(iteration))
        return found

    def _decide(self, rounds: Sequence[SealedRound]) -> None:
        """Raises RuntimeError if the store is lost."""
        iteration, begun_s = rounds[-1].iteration, time.monotonic()
        try:
            decision = self._planner.decide(rounds)
        except NoDecisionError as error:
            if self._closed.is_set():
                return
            decision = self.decisions.in_force
            self._failed.warning("plan %d stays: %s", decision.number, error)
        except Exception:  # a failure of ours must not stop the training
            decision = self.decisions.in_force
            logger.exception("planning failed, plan %d stays", decision.number)
        if len(rounds) > 1:
            logger.debug("caught up with %d iterations at once", len(rounds))
        self.decisions.decided(iteration, decision)
        self._publish()
        logger.debug("decided on iteration %d in %.1f ms", iteration, 1e3 * (time.monotonic() - begun_s))

    def _say_missed(self, iteration: int, entries: bytes) -> None:
        try:
            ranks = self._missing(SealedRound(iteration, entries))
        except (TamperedError, ValueError):  # said once the round is complete
            ranks = self._layout.reporters
        logger.warning(
            "no measurements of ranks %s for iteration %d within %g s; keeping plan %d until they arrive. These ranks "
            "are late, hang, or have lost the job's store",
            *(", ".join(map(str, ranks)), iteration, _MISSED_S, self.decisions.in_force.number),
        )

    def _missing(self, found: SealedRound) -> Sequence[int]:
        layout = self._layout
        here = {(one.pipeline, one.stage) for one in read_round(found, self._seal)}
        where = {rank: (layout.pipeline_of(rank)[0], layout.workers[rank].cell.stage) for rank in layout.reporters}
        return [rank for rank, place in where.items() if place not in here and rank != layout.rank]


def say_lost(rank: int, error: RuntimeError) -> None:
    """The store cannot be reached any more."""
    # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
    logger.debug("rank %d lost the job's store: %s", rank, error)
