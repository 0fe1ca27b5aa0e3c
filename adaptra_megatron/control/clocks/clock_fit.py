# SPDX-License-Identifier: Apache-2.0
"""How one clock relates to another, from messages between the two, and how far off that can be. Pure.

A message that a remote clock stamps bounds the offset from one side each way, for none arrives before it was sent:
with offset = remote - local, the request gives offset <= received - sent, the answer offset >= sent - received. Each
round of messages is an interval for the offset, as wide as its fastest request and its fastest answer take together.
Rounds of some time ago count too, shifted by the drift that a linear fit tells, and widened by how far off that can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_DRIFT = 500e-6
"""Fastest drift of two clocks, in seconds per second: what NTP may steer a clock by; crystals differ by a tenth."""
WANDER = 1e-6
"""How far a drift strays from the mean over the rounds that are kept, as temperatures change."""
KEPT_ROUNDS = 32


class Stamps(NamedTuple):
    """One request and its answer. The outer two are seconds of the local clock, the inner two of the remote one."""

    sent_s: float
    received_s: float
    answered_s: float
    back_s: float


class Round(NamedTuple):
    """What a few exchanges in a row say."""

    at_s: float
    """Local."""
    lower_s: float
    """Seconds to add to the local clock to get the remote one are at least these,"""
    upper_s: float
    """and at most these."""

    @property
    def middle_s(self) -> float:
        return (self.lower_s + self.upper_s) / 2

    @property
    def half_s(self) -> float:
        """Half of what the fastest request and the fastest answer took together."""
        return (self.upper_s - self.lower_s) / 2


class ClockLine(NamedTuple):
    """Offset of a remote clock as a function of local time."""

    at_s: float
    offset_s: float
    """At `at_s`: seconds to add to the local clock."""
    drift: float
    """Change of the offset per second."""
    half_s: float
    """The offset at `at_s` is off by no more than this."""
    rate: float
    """Nor, for each second since or before, by this much more."""

    def offset_at(self, local_s: float) -> float:
        """Seconds to add to `local_s`."""
        return self.offset_s + self.drift * (local_s - self.at_s)

    def error_at(self, local_s: float) -> float:
        """By how much `offset_at` can be off, for clocks whose drift keeps to MAX_DRIFT and WANDER."""
        return self.half_s + self.rate * abs(local_s - self.at_s)


def round_of(exchanges: Iterable[Stamps]) -> Round:
    """The round of a few exchanges (at least one) that follow each other at once."""
    stamps = list(exchanges)
    upper_s = min(entry.received_s - entry.sent_s for entry in stamps)
    lower_s = max(entry.answered_s - entry.back_s for entry in stamps)
    return Round((stamps[0].sent_s + stamps[-1].back_s) / 2, lower_s, upper_s)


class ClockFit:
    """Takes in rounds and tells the line through them. A clock that jumps makes earlier rounds forgotten."""

    def __init__(self) -> None:
        self._rounds: deque[Round] = deque(maxlen=KEPT_ROUNDS)

    def add(self, entry: Round) -> ClockLine:
        """Take in a round, later than all before, and tell the line at its time."""
        self._rounds.append(entry)
        while (line := _line(self._rounds)) is None:
            self._rounds.popleft()  # at the latest, the round itself is left, and agrees with itself
        return line


def _line(rounds: Sequence[Round]) -> ClockLine | None:
    """None if the rounds contradict each other; one alone does not."""
    latest = rounds[-1]
    drift, rate = _drift(rounds)
    lower_s, upper_s = float("-inf"), float("inf")
    for entry in rounds:
        age_s = latest.at_s - entry.at_s
        lower_s = max(lower_s, entry.lower_s + (drift - rate) * age_s)
        upper_s = min(upper_s, entry.upper_s + (drift + rate) * age_s)
    if lower_s > upper_s and len(rounds) > 1:
        return None
    return ClockLine(latest.at_s, (lower_s + upper_s) / 2, drift, abs(upper_s - lower_s) / 2, rate)


def _drift(rounds: Sequence[Round]) -> tuple[float, float]:
    """Least squares, weighted by how narrow rounds are; and how far off it can be.

    That is each round's weight in the slope times how far off its middle can be, so it shrinks as time goes by.
    """
    weights = [1.0 / max(entry.half_s, 1e-9) ** 2 for entry in rounds]
    total = sum(weights)
    mean_at_s = sum(weight * entry.at_s for weight, entry in zip(weights, rounds, strict=True)) / total
    spread = sum(weight * (entry.at_s - mean_at_s) ** 2 for weight, entry in zip(weights, rounds, strict=True))
    if spread <= 0.0:
        return 0.0, MAX_DRIFT
    slope = off = 0.0
    for weight, entry in zip(weights, rounds, strict=True):
        share = weight * (entry.at_s - mean_at_s) / spread
        slope += share * (entry.middle_s - rounds[0].middle_s)
        off += abs(share) * entry.half_s
    rate = WANDER + off
    # A fit that tells less than what is known of any clock is none.
    return (0.0, MAX_DRIFT) if rate + abs(slope) >= MAX_DRIFT else (slope, rate)
