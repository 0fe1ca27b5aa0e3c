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

# Tells a link's latency from its occupancy, given when messages were sent and when they arrived.
# A link carries one message at a time, in order: message i starts when it was sent, or when the one before has left,
# whichever is later; its bytes take nbytes / bandwidth, and it arrives one latency after its last byte left. For a
# given bandwidth that leaves one latency per message, and the right bandwidth is the one for which these agree best,
# whether what tells it is messages that waited for each other, or messages of different sizes.

Array = npt.NDArray[np.float64]

MIN_MESSAGES = 6
"""Fewer do not tell a bandwidth."""
TELLING = 0.7
"""A bandwidth is believed if latencies disagree by no more than this share of what they do without it."""
OUTLIERS = 0.1
"""Share of the messages whose disagreement is not looked at."""
CANDIDATES = 16
_NEGLIGIBLE = 0.01
"""Share of the occupancy: latencies that disagree by less without it need no explaining."""
_NEGATIVE = 0.1
"""Share of the occupancy: a bandwidth that makes latencies more negative claims that messages arrive unsent."""
_SIZES_DIFFER = 1.2
_TOGETHER = 0.25
"""Messages are one bunch whose arrivals are closer than this share of the time between their sending."""


class Messages(NamedTuple):
    """Messages of a link in one iteration, in the order in which they were sent, without lost ones."""

    nbytes: Array
    start_s: Array
    """When each could start at the earliest: sent, and, where that matters, awaited."""
    arrived_s: Array
    telling: npt.NDArray[np.bool_]
    """Which of them tell a latency; the others only kept the link busy."""


def least_held(start_s: Array, arrived_s: Array) -> npt.NDArray[np.bool_]:
    """Return which messages were not held up and let go together with a later one.

    A pause of the receiver, or one late message on a link that keeps the order, delays many messages at once. They
    arrive together: that is one event and no evidence of many, and the last of them was held up least.
    """
    arrivals_apart = arrived_s[1:] - arrived_s[:-1]
    together = (arrivals_apart >= 0.0) & (arrivals_apart < _TOGETHER * (start_s[1:] - start_s[:-1]))
    return np.append(~together, True)


class LinkFit(NamedTuple):
    """Fit of a link's messages in one iteration."""

    latency_s: Array
    """One per telling message; of a link whose bandwidth is not known, with the time the bytes take."""
    seconds_per_byte: float
    identified: bool
    """Set if `seconds_per_byte` is from this iteration; otherwise it is the known one, or 0."""


def fit_link(messages: Messages, known_seconds_per_byte: float | None) -> LinkFit:
    """The occupancy that explains the arrivals best. `known_seconds_per_byte`: what earlier iterations told, if any."""
    candidates = np.zeros(1)
    if np.count_nonzero(messages.telling) >= MIN_MESSAGES:
        candidates = _candidates(messages)
    if len(candidates) > 1:
        scores = _scores(messages, candidates)
        best = int(np.argmin(scores))
        around = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        finer = np.linspace(*around, CANDIDATES)
        finer_scores = _scores(messages, finer)
        score, rate = min((scores[best], candidates[best]), (finer_scores.min(), finer[int(np.argmin(finer_scores))]))
        matters = scores[0] > _NEGLIGIBLE * rate * float(np.median(messages.nbytes))
        if rate > 0.0 and matters and score <= TELLING * scores[0]:
            return LinkFit(_latencies(messages, np.array([rate]))[0], float(rate), identified=True)
    if not known_seconds_per_byte:
        left_s = np.maximum.accumulate(messages.start_s)
        return LinkFit((messages.arrived_s - left_s)[messages.telling], 0.0, identified=False)
    fallback = np.array([0.0, known_seconds_per_byte])
    without, with_known = _scores(messages, fallback)
    # A known bandwidth that makes latencies disagree is no longer true.
    chosen = 1 if with_known <= 1.05 * without else 0
    return LinkFit(_latencies(messages, fallback[[chosen]])[0], float(fallback[chosen]), identified=False)


def _latencies(messages: Messages, seconds_per_byte: Array) -> Array:
    """One row per candidate, one column per telling message."""
    occupancy_s = seconds_per_byte[:, None] * messages.nbytes[None, :]
    busy_s = np.cumsum(occupancy_s, axis=1)
    # start_i = max(earliest_i, left_{i-1}), unrolled: when the link would be free if it had never idled before j.
    left_s = busy_s + np.maximum.accumulate(messages.start_s - (busy_s - occupancy_s), axis=1)
    return (messages.arrived_s - left_s)[:, messages.telling]


def _scores(messages: Messages, seconds_per_byte: Array) -> Array:
    """Mean distance of latencies from their median, the most distant left out; infinite where latencies are negative.

    Of no occupancy at all it is finite: what is negative then is the clocks' fault.
    """
    latencies_s = np.sort(_latencies(messages, seconds_per_byte), axis=1)
    count = latencies_s.shape[1]
    medians_s = (latencies_s[:, (count - 1) // 2] + latencies_s[:, count // 2]) / 2.0
    distances_s = np.sort(np.abs(latencies_s - medians_s[:, None]), axis=1)
    scores = distances_s[:, : max(1, math.ceil((1.0 - OUTLIERS) * count))].mean(axis=1)
    occupancy_s = seconds_per_byte * messages.nbytes.mean()
    impossible = latencies_s[:, int(OUTLIERS * count)] < -_NEGATIVE * occupancy_s
    return np.where(impossible & (seconds_per_byte > 0.0), np.inf, scores)


def _candidates(messages: Messages) -> Array:
    """Seconds per byte worth a look, ascending from 0: spacings of arrivals, and slopes over sizes."""
    nbytes, start_s, arrived_s = (column[messages.telling] for column in messages[:3])
    waited = (start_s[1:] < arrived_s[:-1]) & (nbytes[1:] > 0)
    sizes_differ = bool(nbytes.max() > _SIZES_DIFFER * nbytes.min())
    if not sizes_differ and not waited.any():
        return np.zeros(1)
    rates = [(np.diff(arrived_s)[waited]) / nbytes[1:][waited]]
    if sizes_differ:
        # Theil-Sen: slopes between messages half the list apart, in order of size, so that their sizes do differ.
        order = np.argsort(nbytes, kind="stable")
        sizes, delays_s = nbytes[order], (arrived_s - start_s)[order]
        half = len(order) // 2
        differ = sizes[half:] > sizes[: len(order) - half]
        slopes = (delays_s[half:] - delays_s[: len(order) - half])[differ]
        rates.append(slopes / (sizes[half:] - sizes[: len(order) - half])[differ])
    found = np.concatenate(rates)
    found = found[found > 0.0]
    if not len(found):
        return np.zeros(1)
    return np.concatenate([[0.0], np.unique(np.quantile(found, np.linspace(0.0, 1.0, CANDIDATES)))])


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
    """Return which of so many values are."""
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
    """Common level of the values of several iterations."""

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
