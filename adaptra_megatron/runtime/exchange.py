# SPDX-License-Identifier: Apache-2.0
"""Brings measurements of all ranks to one of them, and its decisions back to all, beside the training.

All goes through the job's own store, in background threads. What was measured in iteration k is decided on during
k + 1 and takes effect in k + 2: the training thread only reads one key per iteration, which is there already.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from adaptra_megatron.runtime.measurements import StageMeasurement
from adaptra_megatron.runtime.membership import Membership, exchange_error
from adaptra_megatron.telemetry.scalars import JobFigures
from adaptra_megatron.telemetry.trace_requests import Iterations

logger = logging.getLogger("adaptra_megatron.runtime")

DELAY = 2
"""Iterations from a measurement to the first iteration that its decision can change."""
_LOOK_UP_S = 1.0
"""How often the leader's thread looks whether it is to end, while ranks take their time."""


class Decision(NamedTuple):
    """What an iteration runs: plan `number`; `csv` is its schedule where it is new, else None."""

    number: int
    csv: str | None
    requests: tuple[Iterations, ...] = ()
    """Which iterations every rank is to trace, new since the decision before."""
    job: JobFigures | None = None
    """What the leader has found, for the rank that has somewhere to show it."""
    predicted_s: float | None = None
    """Of an iteration with a new schedule; `before_predicted_s` of one with what ran before, at the same costs."""
    before_predicted_s: float | None = None
    caps: tuple[float | None, ...] = ()
    """Activations that each stage may hold under a new schedule; empty where there is none."""
    released_at_backward_input: float = 0.0
    """The fraction of an activation that the caps count as free after an input gradient."""


Decide = Callable[[Sequence[StageMeasurement]], Decision]


class PlanExchange:
    """One rank's end of the exchange. Rank 0 leads: it alone calls `decide`, once per measured iteration.

    When a rank dies or the store cannot be reached, `decision` raises ExchangeError after the timeout: no rank can
    know what the others run then. When `decide` itself fails, the error is logged and the running plan is kept.
    """

    LEADER = 0

    def __init__(self, membership: Membership, decide: Decide, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._outbox: queue.SimpleQueue[tuple[int, StageMeasurement] | None] = queue.SimpleQueue()
        # A store client answers one request at a time, and some of them wait: one client per thread.
        store: Any = _get_default_store()
        prefix = f"adaptra/{membership.token}"
        self._store: Any = PrefixStore(prefix, store.clone())
        threads = [threading.Thread(target=self._post_all, args=(PrefixStore(prefix, store.clone()),))]
        if membership.rank == self.LEADER:
            leader = threading.Thread(target=self._lead, args=(PrefixStore(prefix, store.clone()), decide))
            threads.append(leader)
        self._threads = threads
        for thread in threads:
            thread.name, thread.daemon = "adaptra-exchange", True
            thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured; returns at once. Every rank must do so for every iteration from 0 on."""
        self._outbox.put((iteration, measurement))

    def decision(self, iteration: int) -> Decision:
        """What `iteration` (from DELAY on) runs: the same on every rank."""
        key = f"decision/{iteration}"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            return Decision(*pickle.loads(self._store.get(key)))
        except RuntimeError as cause:
            what = f"learn the plan of iteration {iteration}"
            raise exchange_error(self._membership.rank, what, self._timeout_s, cause) from cause

    def close(self) -> None:
        """End the threads; what is under way is dropped."""
        self._closed.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=2 * _LOOK_UP_S)

    def _post_all(self, store: Any) -> None:
        membership = self._membership
        while (item := self._outbox.get()) is not None:
            iteration, measurement = item
            try:
                store.set(f"measured/{iteration}/{membership.rank}", pickle.dumps(measurement))
                if store.add(f"count/{iteration}", 1) == membership.world_size:
                    store.set(f"complete/{iteration}", b"")
            except RuntimeError as error:
                self._say_lost(error)
                return

    def _lead(self, store: Any, decide: Decide) -> None:
        membership = self._membership
        iteration = 0
        number = 0
        while not self._closed.is_set():
            try:
                if not _arrived(store, f"complete/{iteration}"):
                    continue
                keys = [f"measured/{iteration}/{rank}" for rank in range(membership.world_size)]
                measurements = [pickle.loads(entry) for entry in store.multi_get(keys)]
                decision = _decide_or_keep(decide, measurements, number)
                number = decision.number
                store.set(f"decision/{iteration + DELAY}", pickle.dumps(tuple(decision)))
                for key in (*keys, f"count/{iteration}", f"complete/{iteration}", f"decision/{iteration - 1}"):
                    store.delete_key(key)
            except RuntimeError as error:
                self._say_lost(error)
                return
            iteration += 1

    def _say_lost(self, error: RuntimeError) -> None:
        # Normal at the end of a job, when the store goes away with its process; otherwise `decision` raises.
        logger.debug("rank %d lost the job's store: %s", self._membership.rank, error)


def _arrived(store: Any, key: str) -> bool:
    try:
        store.wait([key], timedelta(seconds=_LOOK_UP_S))
    except DistStoreError:
        return False
    return True


def _decide_or_keep(decide: Decide, measurements: Sequence[StageMeasurement], number: int) -> Decision:
    try:
        return decide(measurements)
    except Exception:  # a failure of ours must not stop the training
        logger.exception("adaptra: planning failed, plan %d stays", number)
        return Decision(number, None)
