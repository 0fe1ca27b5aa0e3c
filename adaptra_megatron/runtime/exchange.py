# SPDX-License-Identifier: Apache-2.0
"""Brings measurements of all ranks to one of them, and its decisions back to all, beside the training.

All goes through the job's own store, in background threads. What was measured in iteration k is decided on during
k + 1 and takes effect in k + 2. Planning that takes longer holds up nobody: the leader's own training thread, when it
comes to an iteration that nothing was decided for, writes that what runs is kept, and what is decided later takes
effect later. There is one writer, and it writes the decision of each iteration once: no two ranks can run different
plans.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from adaptra_megatron.runtime.decision_reader import LOOK_UP_S, MOST_NBYTES, DecisionReader, arrives, decision_key
from adaptra_megatron.runtime.decision_writer import DELAY, DecisionWriter
from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.runtime.measurements import StageMeasurement
from adaptra_megatron.runtime.membership import Membership, exchange_error
from adaptra_megatron.transport.placement import job_secret
from adaptra_megatron.transport.sealed_store import SealedStore, TamperedError
from adaptra_megatron.transport.tagged_json import packed, unpacked

logger = logging.getLogger("adaptra_megatron.runtime")

_COLLECT_PAUSE_S = 0.02
"""Between two looks of the leader, who is one, for what all have measured."""
_MISSED_S = 30.0
"""How long a rank may be behind the first one with what it measured before the leader says so."""

Round = Sequence[StageMeasurement]
"""What all ranks measured in one iteration, by rank."""
Decide = Callable[[Sequence[Round]], Decision]
"""Called with all iterations that have been measured since the last call, at least one."""


class PlanExchange:
    """One rank's end of the exchange. Rank 0 leads: it alone calls `decide`, in a thread of its own.

    When the leader dies or the store cannot be reached, `decision` raises ExchangeError, after the timeout at the
    latest: no rank can know what the others run then. When another rank is late with what it measured, or `decide` is
    late or fails, what runs is kept, and the log says so.
    """

    LEADER = 0

    def __init__(self, membership: Membership, decide: Decide, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._secret = job_secret(_get_default_store())
        self._outbox: queue.SimpleQueue[tuple[int, StageMeasurement] | None] = queue.SimpleQueue()
        self._poster = threading.Thread(
            target=self._post_all, args=(self._new_client(),), name="adaptra-exchange", daemon=True
        )
        self._poster.start()
        self._leader: _Leader | None = None
        self._reader: DecisionReader | None = None
        self._decisions: DecisionWriter | DecisionReader
        if membership.rank == self.LEADER:
            clients = self._new_client(), self._new_client()
            self._leader = _Leader(membership, decide, *clients)
            self._decisions = self._leader.decisions
        else:
            self._decisions = self._reader = DecisionReader(self._new_client(), timeout_s)

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured; returns at once. Every rank must do so for every iteration from 0 on."""
        self._outbox.put((iteration, measurement))
        if self._reader is not None:
            self._reader.expect(iteration + DELAY)

    def decision(self, iteration: int) -> Decision:
        """What `iteration` (from DELAY on) runs: the same on every rank.

        To be asked for in ascending order, each after what was measured DELAY iterations before has been handed in.
        """
        assert iteration >= DELAY, "nothing has been measured that the first iterations could follow from"
        try:
            return self._decisions.needed(iteration)
        except (RuntimeError, TimeoutError) as cause:
            what = f"learn the plan of iteration {iteration}"
            raise exchange_error(self._membership.rank, what, self._timeout_s, cause) from cause

    def early_decision(self, iteration: int) -> Decision | None:
        """The same if it has been made already; never waits. None, too, while the store does not answer."""
        return self._decisions.published(iteration)

    def close(self) -> None:
        """End the threads; what is under way is dropped. A planner that hangs is left to itself."""
        self._outbox.put(None)
        for part in (self._leader, self._reader):
            if part is not None:
                part.close()
        self._poster.join(timeout=2 * LOOK_UP_S)

    def _new_client(self) -> Any:
        # A store client answers one request at a time, and some of them wait: one client per thread.
        store: Any = _get_default_store()
        place = f"adaptra/{self._membership.token}"
        return SealedStore(PrefixStore(place, store.clone()), self._secret, place)

    def _post_all(self, store: Any) -> None:
        membership = self._membership
        while (item := self._outbox.get()) is not None:
            iteration, measurement = item
            try:
                store.set(f"measured/{iteration}/{membership.rank}", packed(measurement))
                if store.add(f"count/{iteration}", 1) == membership.world_size:
                    store.set(f"complete/{iteration}", b"")
            except RuntimeError as error:
                _say_lost(membership.rank, error)
                return


class _Leader:
    """Collects measurements, has `decide` called, and publishes decisions, in a thread each.

    Decisions are made by the planner or the training, whichever comes first. Neither waits for the store.
    """

    def __init__(self, membership: Membership, decide: Decide, collecting: Any, writing: Any) -> None:
        """`collecting`, `writing`: clients of the store, one for each of the threads that ask it."""
        self._membership, self._decide = membership, decide
        self._collecting, self._writing = collecting, writing
        self._closed = threading.Event()
        self._rounds: queue.SimpleQueue[tuple[int, Round] | None] = queue.SimpleQueue()
        self._unpublished: queue.SimpleQueue[tuple[int, Decision] | None] = queue.SimpleQueue()
        self._lost: RuntimeError | None = None
        """What the store answered when a decision could not be published."""
        self.decisions = DecisionWriter(self._write)
        self._threads = [
            threading.Thread(target=work, name=f"adaptra-{work.__name__.strip('_')}", daemon=True)
            for work in (self._collect, self._plan, self._publish)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._rounds.put(None)
        self._unpublished.put(None)
        until_s = time.monotonic() + 2 * LOOK_UP_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))

    def _write(self, iteration: int, decision: Decision) -> None:
        if self._lost is not None:
            raise self._lost
        self._unpublished.put((iteration, decision))

    def _publish(self) -> None:
        while (item := self._unpublished.get()) is not None:
            iteration, decision = item
            try:
                self._writing.set(decision_key(iteration), packed(decision))
            except RuntimeError as error:
                self._lost = error
                _say_lost(self._membership.rank, error)
                return

    def _plan(self) -> None:
        while (item := self._rounds.get()) is not None:
            iteration, rounds = item[0], [item[1]]
            while not self._rounds.empty() and (item := self._rounds.get()) is not None:
                iteration = item[0]
                rounds.append(item[1])
            begun_s = time.monotonic()
            try:
                decision = self._decide(rounds)
            except Exception:  # a failure of ours must not stop the training
                decision = self.decisions.in_force
                logger.exception("adaptra: planning failed, plan %d stays", decision.number)
            if len(rounds) > 1:
                logger.debug("adaptra: caught up with %d iterations at once", len(rounds))
            try:
                self.decisions.decided(iteration, decision)
            except RuntimeError as error:
                _say_lost(self._membership.rank, error)
                return
            logger.debug("adaptra: decided on iteration %d in %.1f ms", iteration, 1e3 * (time.monotonic() - begun_s))

    def _collect(self) -> None:
        store, ranks = self._collecting, range(self._membership.world_size)
        iteration, since_s, missed = 0, time.monotonic(), False
        while not self._closed.is_set():
            keys = [f"measured/{iteration}/{rank}" for rank in ranks]
            try:
                if not arrives(store, f"complete/{iteration}", self._closed, LOOK_UP_S, _COLLECT_PAUSE_S):
                    begun = store.check([f"count/{iteration}"])
                    since_s = since_s if begun else time.monotonic()
                    if not missed and time.monotonic() - since_s > _MISSED_S:
                        missed = True
                        self._say_missed(iteration, [rank for rank in ranks if not store.check([keys[rank]])])
                    continue
                self._rounds.put(
                    (iteration, [unpacked(entry, StageMeasurement, MOST_NBYTES) for entry in store.multi_get(keys)])
                )
                # Whoever has handed in its measurement of an iteration has read what that was to run.
                for key in (*keys, f"count/{iteration}", f"complete/{iteration}", decision_key(iteration)):
                    store.delete_key(key)
            except (TamperedError, ValueError) as error:
                logger.error(
                    "adaptra: plan %d stays from now on: what a rank measured in iteration %d cannot be read: %s",
                    *(self.decisions.in_force.number, iteration, error),
                )
                return
            except RuntimeError as error:
                _say_lost(self._membership.rank, error)
                return
            iteration, since_s, missed = iteration + 1, time.monotonic(), False

    def _say_missed(self, iteration: int, ranks: Sequence[int]) -> None:
        logger.warning(
            "adaptra: for %g s there is nothing of what ranks %s measured in iteration %d; until it comes, plan %d "
            "stays. They are late, hang, or have lost the job's store",
            *(_MISSED_S, ", ".join(map(str, ranks)), iteration, self.decisions.in_force.number),
        )


def _say_lost(rank: int, error: RuntimeError) -> None:
    # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
    logger.debug("rank %d lost the job's store: %s", rank, error)
