# SPDX-License-Identifier: Apache-2.0
"""Divide whole micro-batches between replicas, if the duration of each is known beforehand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from adaptra_megatron.schedule.costs import CostError


def balanced_replicas(
    seconds: Sequence[Sequence[float]], slowness: Sequence[float] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches that each replica runs, by ascending job number (replica * count + number).

    `seconds[replica][number]`: time of a micro-batch at a replica of slowness 1; `slowness`: factor of each replica
    (default 1). Each replica keeps its count, so the global batch is unchanged. The busiest replica swaps a
    micro-batch for a shorter one of another replica, the least busy first, while that shortens the longer of the
    two.

    Raises CostError for replicas with different counts.
    """
    replicas, count = len(seconds), len(seconds[0]) if seconds else 0
    if any(len(row) != count for row in seconds) or len(slowness) not in (0, replicas):
        raise CostError(
            f"replicas must have equally many micro-batches, and one slowness each: got "
            f"{[len(row) for row in seconds]} micro-batches and {len(slowness)} values of slowness"
        )
    slow = list(slowness) or [1.0] * replicas
    held = [
        sorted((row[number], replica * count + number) for number in range(count))
        for replica, row in enumerate(seconds)
    ]
    work = [factor * sum(row) for factor, row in zip(slow, seconds, strict=True)]
    while True:
        fullest = max(range(replicas), key=work.__getitem__, default=0)
        for other in sorted(range(replicas), key=work.__getitem__):
            swap = _best_swap(held[fullest], held[other], work[fullest], work[other], slow[fullest], slow[other])
            if swap is not None:
                break
        else:
            return tuple(tuple(sorted(number for _, number in row)) for row in held)
        given, taken = held[fullest].pop(swap[0]), held[other].pop(swap[1])
        held[fullest] = sorted([*held[fullest], taken])
        held[other] = sorted([*held[other], given])
        work[fullest] -= slow[fullest] * (given[0] - taken[0])
        work[other] += slow[other] * (given[0] - taken[0])


_LEAST_GAIN = 1e-6
"""Least relative gain of a swap in the longer work; smaller gains are rounding, and swaps would not end."""


def _best_swap(
    full: Sequence[tuple[float, int]],
    other: Sequence[tuple[float, int]],
    full_s: float,
    other_s: float,
    slow: float,
    other_slow: float,
) -> tuple[int, int] | None:
    """Return the positions of the two micro-batches whose swap is best for the longer of two replicas; None: none
    helps."""
    wanted_s = (full_s - other_s) / (slow + other_slow)
    best_s, best = full_s * (1.0 - _LEAST_GAIN), None
    for position, (given_s, _) in enumerate(full):
        near = bisect_left(other, (given_s - wanted_s, 0))
        for candidate in (near - 1, near):
            if 0 <= candidate < len(other):
                moved_s = given_s - other[candidate][0]
                longer_s = max(full_s - slow * moved_s, other_s + other_slow * moved_s)
                if longer_s < best_s:
                    best_s, best = longer_s, (position, candidate)
    return best
