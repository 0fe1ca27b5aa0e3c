# SPDX-License-Identifier: Apache-2.0
"""Robust statistics of one measured quantity: of an iteration, and of the latest iterations at one level."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.detector.link_model import Array

_KEPT_VALUES = 64
"""Per iteration; of more, evenly spaced ones in order of size."""
_SCALE = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation."""
_ENOUGH_ITERATIONS = 5
"""For their medians' scatter to be known."""


def quantiles(ordered: Sequence[float], *fractions: float) -> list[float]:
    """As np.quantile of values in ascending order, at a twentieth of its cost for the short lists there are here."""
    found = []
    for fraction in fractions:
        position = fraction * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        lower = ordered[below]
        found.append(lower + (position - below) * (ordered[above] - lower))
    return found


@functools.lru_cache(maxsize=64)
def _kept(count: int) -> npt.NDArray[np.intp]:
    """Which of so many values are."""
    kept: npt.NDArray[np.intp] = np.linspace(0, count - 1, _KEPT_VALUES).round().astype(np.intp)
    return kept


class Batch:
    """The values of one iteration."""

    def __init__(self, iteration: int, values: Array) -> None:
        """`values`: at least one, in any order."""
        values = np.sort(values)
        self.iteration = iteration
        self.count = len(values)
        self.low, lower, self.median, upper, self.high = quantiles(values.tolist(), 0.1, 0.25, 0.5, 0.75, 0.9)
        self.spread = upper - lower
        if self.count > _KEPT_VALUES:
            values = values[_kept(self.count)]
        self.values = values


class Level(NamedTuple):
    """What values of several iterations have in common."""

    value: float
    """Median of the iterations' medians."""
    low: float
    """Tenth percentile of all values."""
    high: float
    """Ninetieth."""
    spread: float
    """Distance of the quartiles of all values."""
    scatter: float
    """Standard deviation of the iterations' medians, by their median absolute deviation; 0 while there are few."""
    iterations: int
    until_iteration: int

    def noise(self, count: int) -> float:
        """Standard deviation to expect of the median of `count` values.

        What iterations showed, but no less than the values' own spread makes likely: for normal as for exponential
        noise that is within a tenth of the distance of quartiles / sqrt(count).
        """
        return max(self.scatter, self.spread / math.sqrt(count))


class Window:
    """The latest iterations at one level."""

    def __init__(self, length: int) -> None:
        self._batches: deque[Batch] = deque(maxlen=length)
        self._value: float | None = None
        self._level: Level | None = None

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def until_iteration(self) -> int | None:
        """The latest one in the window."""
        return self._batches[-1].iteration if self._batches else None

    def add(self, batch: Batch) -> None:
        """Take an iteration in; the oldest leaves when the window is full."""
        self._batches.append(batch)
        self._value = self._level = None

    @property
    def value(self) -> float:
        """Value of the level, without the rest of it, which most iterations do not need."""
        if self._value is None:
            (self._value,) = quantiles(sorted(batch.median for batch in self._batches), 0.5)
        return self._value

    def level(self) -> Level:
        """Level of all iterations in the window, at least one."""
        if self._level is None:
            value, count = self.value, len(self._batches)
            low, lower, upper, high = quantiles(np.sort(self._values(count)).tolist(), 0.1, 0.25, 0.75, 0.9)
            scatter = 0.0
            if count >= _ENOUGH_ITERATIONS:
                scatter = _SCALE * quantiles(sorted(abs(batch.median - value) for batch in self._batches), 0.5)[0]
            until = self._batches[-1].iteration
            self._level = Level(value, low, high, upper - lower, scatter, count, until)
        return self._level

    def latest_quantile(self, fraction: float, iterations: int) -> float:
        """Quantile of the latest iterations: the smallest value that at least `fraction` of them do not exceed."""
        values = self._values(iterations)
        place = max(0, math.ceil(fraction * len(values)) - 1)
        return float(np.partition(values, place)[place])

    def _values(self, iterations: int) -> Array:
        return np.concatenate([batch.values for batch in list(self._batches)[-iterations:]])
