# SPDX-License-Identifier: Apache-2.0
"""Tells a link's latency from its occupancy, given when messages were sent and when they arrived.

A link carries one message at a time, in order: message i starts when it was sent, or when the one before has left,
whichever is later; its bytes take nbytes / bandwidth, and it arrives one latency after its last byte left. For a given
bandwidth that leaves one latency per message, and the right bandwidth is the one for which these agree best, whether
what tells it is messages that waited for each other, or messages of different sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_MESSAGES = 6
"""Fewer do not tell a bandwidth."""
TELLING = 0.7
"""A bandwidth is believed if latencies disagree by no more than this share of what they do without it."""
OUTLIERS = 0.1
"""Share of the messages whose disagreement is not looked at."""
CANDIDATES = 16
_SIZES_DIFFER = 1.2


class Messages(NamedTuple):
    """Of one link in one iteration, in the order in which they were sent; lost ones left out."""

    nbytes: Array
    start_s: Array
    """When each could start at the earliest: sent, and, where that matters, awaited."""
    arrived_s: Array
    telling: npt.NDArray[np.bool_]
    """Which of them tell a latency; the others only kept the link busy."""


class LinkFit(NamedTuple):
    """How a link did in one iteration."""

    latency_s: Array
    """One per telling message; of a link whose bandwidth is not known, with the time the bytes take."""
    seconds_per_byte: float
    identified: bool
    """Whether this iteration told `seconds_per_byte`; otherwise it is the known one, or 0."""


def fit_link(messages: Messages, known_seconds_per_byte: float | None) -> LinkFit:
    """The occupancy that explains the arrivals best. `known_seconds_per_byte`: what earlier iterations told, if any."""
    candidates = np.zeros(1)
    if np.count_nonzero(messages.telling) >= MIN_MESSAGES:
        candidates = _candidates(messages)
    if len(candidates) > 1:
        scores = _disagreement(_latencies(messages, candidates))
        best = int(np.argmin(scores))
        around = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        finer = np.linspace(*around, CANDIDATES)
        finer_scores = _disagreement(_latencies(messages, finer))
        score, rate = min((scores[best], candidates[best]), (finer_scores.min(), finer[int(np.argmin(finer_scores))]))
        if rate > 0.0 and score <= TELLING * scores[0]:
            return LinkFit(_latencies(messages, np.array([rate]))[0], float(rate), identified=True)
    fallback = np.array([0.0, known_seconds_per_byte or 0.0])
    latencies = _latencies(messages, fallback)
    without, with_known = _disagreement(latencies)
    # A known bandwidth that makes latencies disagree is no longer true.
    chosen = 1 if with_known <= 1.05 * without else 0
    return LinkFit(latencies[chosen], float(fallback[chosen]), identified=False)


def _latencies(messages: Messages, seconds_per_byte: Array) -> Array:
    """One row per candidate, one column per telling message."""
    occupancy_s = seconds_per_byte[:, None] * messages.nbytes[None, :]
    busy_s = np.cumsum(occupancy_s, axis=1)
    # start_i = max(earliest_i, left_{i-1}), unrolled: when the link would be free if it had never idled before j.
    left_s = busy_s + np.maximum.accumulate(messages.start_s - (busy_s - occupancy_s), axis=1)
    return (messages.arrived_s - left_s)[:, messages.telling]


def _disagreement(latencies_s: Array) -> Array:
    """Mean distance from the median, per candidate, the most distant messages left out."""
    distances = np.sort(np.abs(latencies_s - np.median(latencies_s, axis=1, keepdims=True)), axis=1)
    kept = max(1, int(np.ceil((1.0 - OUTLIERS) * distances.shape[1])))
    return np.asarray(distances[:, :kept].mean(axis=1))


def _candidates(messages: Messages) -> Array:
    """Seconds per byte worth a look, ascending from 0: spacings of arrivals, and slopes over sizes."""
    nbytes, start_s, arrived_s = (column[messages.telling] for column in messages[:3])
    waited = (start_s[1:] < arrived_s[:-1]) & (nbytes[1:] > 0)
    rates = [(np.diff(arrived_s)[waited]) / nbytes[1:][waited]]
    if nbytes.max() > _SIZES_DIFFER * nbytes.min():
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
