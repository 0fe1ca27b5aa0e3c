# SPDX-License-Identifier: Apache-2.0
"""When a rank that has failed is started again: pauses that grow, and failures that are forgotten. Pure bookkeeping."""

from __future__ import annotations

from adaptra_megatron.backoff import Backoff

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HEALTHY_S = 3600.0
"""A process that has run for so long, and trained, has its rank's earlier failures forgotten."""


class Restarts:
    """Of one rank on one host. Times are given (seconds of the monotonic clock)."""

    def __init__(self, most: int, now_s: float) -> None:
        """`most`: how many failures are followed by another start (--max-restarts)."""
        self.count = 0
        """Failures that are not forgotten, and were or will be followed by another start."""
        self._most, self._started_s = most, now_s
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._due_s: float | None = None

    def fail(self, now_s: float, *, trained: bool) -> float | None:
        """Note that the rank's process has failed, or could not be started. Returns the pause before the next start;
        None where there is none. `trained`: it had part in the job, and did not just try to."""
        if trained:
            self._backoff.reset()
            if now_s - self._started_s >= HEALTHY_S:
                self.count = 0
        if self.count >= self._most:
            return None
        self.count += 1
        pause_s = self._backoff.next_s()
        self._due_s = now_s + pause_s
        return pause_s

    def start(self, now_s: float) -> bool:
        """Return whether the next process is to be started now, and take it for started."""
        if self._due_s is None or now_s < self._due_s:
            return False
        self._due_s, self._started_s = None, now_s
        return True
