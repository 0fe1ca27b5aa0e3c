# SPDX-License-Identifier: Apache-2.0
"""Sees to it that every iteration has exactly one decision, and that none waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from adaptra_megatron.control.decisions import Decision

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
