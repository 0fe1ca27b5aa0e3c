# SPDX-License-Identifier: Apache-2.0
"""Reads the leader's decisions ahead of the training, which then never asks the job's store for anything."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.transport.tagged_json import unpacked

MOST_NBYTES = 1 << 26
"""Of a decision, or a measurement."""
LOOK_UP_S = 1.0
"""How long a thread that asks the store, and is to end, is waited for, and how often it looks at what else there is."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
"""Between two looks into the store, which all ranks share; each is half as long again as the one before."""


def decision_key(iteration: int) -> str:
    """Under which the decision of an iteration is in the store."""
    return f"decision/{iteration}"


def arrives(
    store: Any,
    key: str,
    closed: threading.Event,
    limit_s: float = math.inf,
    longest_pause_s: float = _LONGEST_PAUSE_S,
    hurry: threading.Event | None = None,
) -> bool:
    """Whether `key` gets into the store within `limit_s`, and before `closed` is set. Raises RuntimeError.

    Looks again and again: a wait of the store's own that expires writes warnings of a broken network into the log.
    Pauses grow, and begin anew once `hurry` is set.
    """
    until_s, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while not closed.is_set():
        if store.check([key]):
            return True
        if time.monotonic() >= until_s:
            return False
        if hurry is None or hurry.is_set():
            closed.wait(pause_s)
        elif hurry.wait(pause_s):
            pause_s = _FIRST_PAUSE_S
            continue
        pause_s = min(1.5 * pause_s, longest_pause_s)
    return False


class DecisionReader:
    """Of a rank that follows: a thread that waits for each decision as soon as there can be one."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """`store`: a client of its own, because it answers one request at a time. `timeout_s`: how long a decision may
        be waited for."""
        self._store, self._timeout_s = store, timeout_s
        self._expected: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._hurry = threading.Event()
        """The training waits."""
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
            if iteration not in self._decisions:
                self._hurry.set()
            self._news.wait_for(lambda: iteration in self._decisions or self._failure is not None, self._timeout_s)
            self._hurry.clear()
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
        self._hurry.set()
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
        key = decision_key(iteration)
        if not arrives(self._store, key, self._closed, hurry=self._hurry):
            return None
        try:
            decision: Decision = unpacked(self._store.get(key), Decision, MOST_NBYTES)
        except ValueError as cause:
            raise RuntimeError(f"the decision of iteration {iteration} cannot be read: {cause}") from cause
        return decision
