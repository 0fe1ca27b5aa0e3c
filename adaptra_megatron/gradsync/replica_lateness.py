# SPDX-License-Identifier: Apache-2.0
"""Find which replica arrives last at synchronisations, by how much, and how reliably. No clocks are compared.

All replicas leave a synchronisation at about the same time, so the one that spent the shortest time in it came last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from adaptra_megatron.gradsync.all_reduce.algorithms import AllReduceWire

PERSISTENT = 4
"""Number of successive synchronisations at which a replica must come last before its delay is used.

If three replicas come last at random, one does so four times in a row once in 27 synchronisations. The mean cost is
less than 1% of an all-reduce.
"""
_KEPT = 9


class Lateness:
    """Measurements of one group of replicas. All replicas get the same numbers, and so agree."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._latest: deque[tuple[int, float]] = deque(maxlen=PERSISTENT)
        self._latencies_s: deque[float] = deque(maxlen=_KEPT)
        self._bytes_s: deque[float] = deque(maxlen=_KEPT)

    def saw(self, waits_s: Sequence[float], latency_s: float, stock_nbytes: int) -> None:
        """Record one synchronisation. `waits_s`: seconds that each replica spent in it, by index.

        `latency_s`: of a message. `stock_nbytes`: bytes that a library's all-reduce summed in it; 0 if it did not sum
        all.
        """
        last, delay_s = last_arrival(waits_s)
        self._latest.append((last, delay_s))
        self._latencies_s.append(latency_s)
        if stock_nbytes:
            steps_s = 2 * (self._ranks - 1) * latency_s
            per_byte = max(0.0, waits_s[last] - steps_s) / stock_nbytes
            self._bytes_s.append(per_byte * self._ranks / (2 * (self._ranks - 1)))

    @property
    def last(self) -> int:
        """Index of the replica that came last to the latest synchronisation; before the first, the last index."""
        return self._latest[-1][0] if self._latest else self._ranks - 1

    @property
    def sure_delay_s(self) -> float:
        """Return the minimum delay of the last replica over the latest `PERSISTENT` synchronisations; 0 if it was not
        always the same replica.
        """
        if len(self._latest) < PERSISTENT or len({last for last, _ in self._latest}) > 1:
            return 0.0
        return min(delay_s for _, delay_s in self._latest)

    @property
    def wire(self) -> AllReduceWire | None:
        """Return the median measurements; None before a library's all-reduce was measured."""
        return AllReduceWire(median(self._latencies_s), median(self._bytes_s)) if self._bytes_s else None


def last_arrival(waits_s: Sequence[float]) -> tuple[int, float]:
    """Return the index of the last of at least two replicas, and its delay after all others in seconds."""
    last = min(range(len(waits_s)), key=waits_s.__getitem__)
    return last, min(wait_s for index, wait_s in enumerate(waits_s) if index != last) - waits_s[last]
