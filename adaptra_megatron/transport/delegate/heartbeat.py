# SPDX-License-Identifier: Apache-2.0
"""Watches that the delegate answers: a process that is stopped or hangs keeps its sockets open and says nothing.

Silence is counted only while the asking process itself ran: one that was stopped, or kept from running by a busy
machine or a long garbage collection, comes back late for its own tick, and that tick proves nothing about others.
"""

from __future__ import annotations

INTERVAL_S = 0.25
PATIENCE_S = 0.75
"""Silence after which a delegate is given up."""
STARTING_S = 60.0
"""Patience with the first answer: a new process imports, over a cold network file system too, beside many others."""
LATE_S = 0.1
"""A tick that is later than this was not on time."""


class Heartbeat:
    """Pings of one delegate. Pure bookkeeping; times are given (seconds of the monotonic clock).

    Call `tick` at `next_s` or when convenient after it, and `answered` for each answer, before a tick that is due.
    """

    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        """How long the ping under way has been without answer, while this process ran."""
        self.next_s = now_s
        self._last_s = now_s
        self._asked = 0
        self._answered = 0

    def exhausts(self, patience_s: float) -> bool:
        """Return whether it has been silent for too long; there is more patience with its first answer."""
        return self.silent_s >= (patience_s if self._answered else max(STARTING_S, patience_s))

    def tick(self, now_s: float) -> int | None:
        """The number of the ping to send now, if one is due."""
        if now_s < self.next_s:
            return None
        on_time, elapsed_s = now_s - self.next_s <= LATE_S, now_s - self._last_s
        self._last_s, self.next_s = now_s, now_s + INTERVAL_S
        if self._asked > self._answered:
            self.silent_s += elapsed_s if on_time else 0.0
            return None
        self._asked += 1
        return self._asked

    def answered(self, number: int) -> None:
        """It has answered ping `number`."""
        self._answered = max(self._answered, number)
        if self._answered == self._asked:
            self.silent_s = 0.0
