# SPDX-License-Identifier: Apache-2.0
"""Reads the leader's decisions ahead of the training, which then never asks the job's store for anything."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.transport.tagged_json import unpacked

MOST_NBYTES = 1 << 26
"""Of a decision, or a measurement."""
LOOK_UP_S = 1.0
"""How often a thread that waits for the store looks whether it is to end."""


def decision_key(iteration: int) -> str:
    """Under which the decision of an iteration is in the store."""
    return f"decision/{iteration}"


class DecisionReader:
    """Of a rank that follows: a thread that waits for each decision as soon as there can be one."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """`store`: a client of its own, because it answers one request at a time, and these wait. `timeout_s`: how long
        a decision may be waited for."""
        self._timeout_s = timeout_s
        store.set_timeout(timedelta(seconds=LOOK_UP_S))
        self._store = store
        self._expected: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._decisions: dict[int, Decision] = {}
        self._failure: RuntimeError | None = None
        self._thread = threading.Thread(target=self._read_all, name="adaptra-decisions", daemon=True)
        self._thread.start()

    def expect(self, iteration: int) -> None:
        """The decision of `iteration` is to be read next; returns at once."""
        self._expected.put(iteration)

    def published(self, iteration: int) -> Decision | None:
        """The decision of an expected iteration, if it is here; never waits."""
        with self._news:
            return self._decisions.get(iteration)

    def needed(self, iteration: int) -> Decision:
        """The decision of an expected iteration; earlier ones are forgotten.

        Raises RuntimeError if the store has failed, TimeoutError if it holds no decision until the timeout.
        """
        with self._news:
            self._news.wait_for(lambda: iteration in self._decisions or self._failure is not None, self._timeout_s)
            for earlier in [known for known in self._decisions if known < iteration]:
                del self._decisions[earlier]
            if iteration in self._decisions:
                return self._decisions[iteration]
            if self._failure is not None:
                raise self._failure
        raise TimeoutError("nothing was decided")

    def close(self) -> None:
        """End the thread; after a decision that never came, within `LOOK_UP_S`."""
        self._closed.set()
        self._expected.put(None)
        self._thread.join(timeout=2 * LOOK_UP_S)

    def _read_all(self) -> None:
        while (iteration := self._expected.get()) is not None:
            try:
                decision = self._read(iteration)
            except RuntimeError as error:
                with self._news:
                    self._failure = error
                    self._news.notify_all()
                return
            if decision is None:
                return
            with self._news:
                self._decisions[iteration] = decision
                self._news.notify_all()

    def _read(self, iteration: int) -> Decision | None:
        """None if told to end while there is none."""
        while not self._closed.is_set():
            try:
                decision: Decision = unpacked(self._store.get(decision_key(iteration)), Decision, MOST_NBYTES)
                return decision
            except DistStoreError:
                continue
            except ValueError as cause:
                raise RuntimeError(f"the decision of iteration {iteration} cannot be read: {cause}") from cause
        return None
