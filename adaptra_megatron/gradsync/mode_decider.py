# SPDX-License-Identifier: Apache-2.0
"""Choose the mode of updates from the replicas' measurements. All replicas get the same numbers, and so agree."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from adaptra_megatron.gradsync.sync_modes import (
    Candidate,
    ModeKind,
    choose,
    stragglers,
)
from adaptra_megatron.gradsync.update_order import Update

KEPT, LEAST = 5, 3
"""Number of a replica's latest times whose median predicts the next one, and minimum number of times. Compared with
means and autoregression on recorded jobs by benchmarks/sync_predictors.py."""
_SQUARES = 50
_UNKNOWN = math.inf


class Gradient(NamedTuple):
    """Description of a gradient that a replica reports."""

    compute_s: float
    """Time to compute it."""
    square: float
    """Squared norm of the gradient, which is the mean over a replica's batch; of one stage's parameters."""
    update_square: float | None
    """Squared norm of the mean over all replicas in the previous update; None if some were missing."""


def predicted_s(times_s: Sequence[float]) -> float:
    """Predict a replica's next time from its latest ones."""
    return median(times_s)


class ModeDecider:
    """Chooses a mode anew when the predicted stragglers change."""

    def __init__(self, replicas: int, kinds: Iterable[ModeKind], max_staleness: int) -> None:
        """`kinds`: kinds of modes to choose from, besides synchronous training."""
        self._kinds, self._max_staleness = tuple(kinds), max_staleness
        self._times_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(replicas)]
        self._warm = [False] * replicas
        self._squares = [0.0] * replicas
        self._small: float | None = None
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_SQUARES)
        self._stragglers: frozenset[int] = frozenset()

    @property
    def noise(self) -> float:
        """Return the gradient noise scale in batches of one replica (arXiv 1812.06162, appendix A.1).

        It is computed from the norms of one replica's gradient and of the mean of all. Infinite before there are any,
        and when they are inconclusive.
        """
        if not self._pairs:
            return _UNKNOWN
        replicas = len(self._times_s)
        small, big = (fmean(pair[which] for pair in self._pairs) for which in (0, 1))
        signal = (replicas * big - small) / (replicas - 1)
        variance = max(0.0, (small - big) / (1 - 1 / replicas))
        return variance / signal if signal > 0 else _UNKNOWN

    @property
    def times_s(self) -> list[float] | None:
        """Return the predicted times of all replicas; None while one of them has too few measurements."""
        if min(map(len, self._times_s)) < LEAST:
            return None
        return [predicted_s(each) for each in self._times_s]

    def arrived(self, replica: int, gradient: Gradient) -> None:
        """Record a gradient of `replica`. Its first is ignored, since compilers and allocators slow it down."""
        if self._warm[replica]:
            self._times_s[replica].append(max(gradient.compute_s, 1e-9))
        self._warm[replica] = True
        self._squares[replica] = gradient.square
        if gradient.update_square is not None and self._small is not None:
            self._pairs.append((self._small, gradient.update_square))
            self._small = None

    def decide(self, update: Update) -> Candidate | None:
        """Return the new mode after `update`; None if it stays."""
        self._small = fmean(self._squares) if update.together else None
        times_s = self.times_s
        if times_s is None or (found := stragglers(times_s, self._stragglers)) == self._stragglers:
            return None
        self._stragglers = found
        return choose(times_s, self._kinds if found else (), self._max_staleness, self.noise)
