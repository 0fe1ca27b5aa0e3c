# SPDX-License-Identifier: Apache-2.0
"""Find change points of one measured quantity, with hysteresis and robust statistics.

Tells a link's latency from its occupancy, given when messages were sent and when they arrived.
A link carries one message at a time, in order: message i starts when it was sent, or when the one before has left,
whichever is later; its bytes take nbytes / bandwidth, and it arrives one latency after its last byte left. For a
given bandwidth that leaves one latency per message, and the right bandwidth is the one for which these agree best,
whether what tells it is messages that waited for each other, or messages of different sizes.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.detector.observations import ChangeSettings, DetectorSettings, State

Array = npt.NDArray[np.float64]

MIN_MESSAGES = 6
"""Fewest messages that a bandwidth is fitted to."""
TELLING = 0.7
"""A fitted bandwidth is used if the spread of the latencies that it leaves is at most this share of the spread
without it."""
OUTLIERS = 0.1
"""Share of the messages that are left out of the spread: those farthest off."""
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


class FlapDamper:
    """Flap damping of a link or stage: each relapse soon after a recovery lengthens the next hold time."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._recovered: int | None = None
        self.flaps = 0
        """Relapses, each soon after the recovery before."""

    def fell(self, iteration: int) -> None:
        """It stopped being healthy."""
        soon = self._recovered is not None and iteration - self._recovered <= self._settings.flap_iterations
        self.flaps = self.flaps + 1 if soon else 0

    def recovered(self, iteration: int) -> None:
        """It is healthy again."""
        self._recovered = iteration

    @property
    def hold_iterations(self) -> int:
        """Return how many iterations in a row must show a recovery for it to be believed."""
        doublings = min(self.flaps, self._settings.longest_hold_iterations.bit_length())
        return max(
            self._settings.confirm_iterations,
            min(self._settings.longest_hold_iterations, self._settings.confirm_iterations << doublings),
        )


class Change(NamedTuple):
    """A new level, or only a new verdict on the level there is."""

    before: State
    state: State
    since_iteration: int
    level_s: float
    previous_s: float
    baseline: Level
    evidence: Reason
    of_others: bool = False
    """`previous_s` and `baseline` are not its own, but those of its peers: nothing of it was known before."""
    learnt_slow: bool = False
    """What is taken for healthy was first seen when something that it shares its way with was slow already."""


class _Verdict(NamedTuple):
    """How one iteration compares with the present level."""

    direction: int
    """1 slower, -1 faster, 0 the same."""
    overwhelming: bool = False


_SAME = _Verdict(0)
_FAR_ABOVE = 4.0
"""Multiple of the smallest shift that counts."""


class Series:
    """One quantity in seconds, such as the transfer time of a link; smaller is better.

    An iteration that differs from the present level is held back until others confirm it, and forgotten if they do
    not: neither the level nor an estimate ever sees it.
    """

    def __init__(self, settings: DetectorSettings, changes: ChangeSettings, damper: FlapDamper) -> None:
        self.state = State.HEALTHY
        self._settings, self._changes, self._damper = settings, changes, damper
        self.window = Window(settings.baseline_iterations)
        """Values at the present level."""
        self._healthy_window = self.window
        """Values at the latest healthy level, to which a recovery comes back."""
        self.settled = False
        """Set once there is a level to compare with."""
        self._baseline: Level | None = None
        """What was healthy, while the present level is slow."""
        self._lowest: Level | None = None
        self._recent: deque[int] = deque(maxlen=settings.recurrence_window)
        self._streak = 0
        self._direction = 0
        self._since = 0

    @property
    def baseline(self) -> Level:
        """Return what is healthy."""
        return self._baseline if self._baseline is not None else self.window.level()

    def observe(self, batch: Batch, action_s: float) -> Change | None:
        """Judge an iteration of a job whose median action takes `action_s`."""
        if not self.settled:
            self.window.add(batch)
            self.settled = len(self.window) >= self._settings.settling_iterations
            return None
        verdict = self._judge(batch, action_s)
        self._recent.append(verdict.direction)
        if verdict.direction == 0:
            self._streak = 0
            self.window.add(batch)
            return self._look_for_creeping(batch.iteration, action_s)
        if self._streak == 0 or verdict.direction != self._direction:
            self._streak, self._direction, self._since = 0, verdict.direction, batch.iteration
        self._streak += 1
        evidence = self._confirmation(verdict)
        return None if evidence is None else self._switch(batch, action_s, evidence)

    def accepted(self, iteration: int) -> bool:
        """Return whether `iteration` was taken for one of the present level."""
        return self.window.until_iteration == iteration

    def declare_slow(self, healthy_s: float, iteration: int, evidence: Reason) -> Change:
        """Its level is slow beside its peers': health is `healthy_s`, of which nothing else is known."""
        level = self.window.level()
        self._baseline = level._replace(value=healthy_s, scatter=0.0)
        self._healthy_window = Window(self._settings.baseline_iterations)
        return self._fall(iteration, iteration, level.value, healthy_s, evidence)._replace(of_others=True)

    def forget(self) -> None:
        """What comes cannot be compared with what was: settle anew."""
        self.state, self.settled = State.HEALTHY, False
        self.window = self._healthy_window = Window(self._settings.baseline_iterations)
        self._baseline = self._lowest = None
        self._streak = 0
        self._recent.clear()

    def _judge(self, batch: Batch, action_s: float) -> _Verdict:
        changes, value_s = self._changes, self.window.value
        if self.state is State.HEALTHY and abs(batch.median - value_s) < changes.material_s(value_s, action_s):
            return _SAME
        level = self.window.level()
        margin_s = max(changes.material_s(level.value, action_s), changes.sigmas * level.noise(batch.count))
        shift_s = batch.median - level.value
        if self.state is State.SLOW and batch.median <= self._healthy_limit(batch, action_s):
            return _Verdict(-1, self._overwhelming(batch, level, shift_s))
        if abs(shift_s) < margin_s:
            return _SAME
        return _Verdict(1 if shift_s > 0 else -1, self._overwhelming(batch, level, shift_s))

    def _healthy_limit(self, batch: Batch, action_s: float) -> float:
        """Half-way to what would be called slow: a level in between stays what it is.

        But for one that was far above: what falls from there to where it would not be called slow does not hover.
        """
        baseline, changes = self.baseline, self._changes
        noise_s = 0.75 * changes.sigmas * baseline.noise(batch.count)
        material_s = changes.material_s(baseline.value, action_s)
        far_above = self.window.value - baseline.value > _FAR_ABOVE * material_s
        return baseline.value + max((0.9 if far_above else 0.5) * material_s, noise_s)

    def _overwhelming(self, batch: Batch, level: Level, shift_s: float) -> bool:
        """Nearly all values beyond nearly all known ones, and shifted alike, as no pause or burst of load does it."""
        if not self._changes.single_iteration or batch.count < self._settings.overwhelming_messages:
            return False
        # Half the shift: a burst of jitter delays some messages little.
        lowest_s = max(level.high, level.value + 0.5 * shift_s)
        apart = batch.low > lowest_s if shift_s > 0 else batch.high < level.low
        return apart and batch.spread <= max(2.0 * level.spread, 0.25 * abs(shift_s))

    def _confirmation(self, verdict: _Verdict) -> str | None:
        """Return why the change is believed now; None while it is not."""
        settings, damper = self._settings, self._damper
        slower = verdict.direction > 0
        if verdict.overwhelming and (slower or damper.flaps == 0):
            return "nearly all messages of the iteration alike"
        needed = settings.confirm_iterations if slower else damper.hold_iterations
        if self._streak >= needed:
            after_flaps = f" after {damper.flaps} relapses" if damper.flaps and not slower else ""
            return f"{self._streak} iterations in a row{after_flaps}"
        recurrent = sum(direction > 0 for direction in self._recent)
        if slower and recurrent >= settings.recurrent_iterations:
            return f"{recurrent} of the latest {len(self._recent)} iterations"
        return None

    def _switch(self, batch: Batch, action_s: float, evidence: Reason) -> Change:
        """Enter the level that `batch` shows."""
        previous_s = self.window.level().value
        if self._direction > 0:
            if self.state is State.HEALTHY:
                self._healthy_window, self._baseline = self.window, self.window.level()
            self._start_window(Window(self._settings.baseline_iterations), batch)
            return self._fall(batch.iteration, self._since, batch.median, previous_s, evidence)
        before, healthy = self.state, self.baseline
        if before is State.SLOW and batch.median > self._healthy_limit(batch, action_s):
            self._start_window(Window(self._settings.baseline_iterations), batch)
        elif before is State.SLOW:
            self._start_window(self._healthy_window, batch)
            self._recover(batch.iteration)
        else:
            self._start_window(Window(self._settings.baseline_iterations), batch)
            self._lowest = None
        return Change(before, self.state, self._since, batch.median, previous_s, healthy, evidence)

    def _start_window(self, window: Window, batch: Batch) -> None:
        self.window = window
        self.window.add(batch)
        self._streak = 0
        self._recent.clear()

    def _fall(self, iteration: int, since: int, level_s: float, previous_s: float, evidence: Reason) -> Change:
        before, self.state = self.state, State.SLOW
        if before is State.HEALTHY:
            self._damper.fell(iteration)
        return Change(before, State.SLOW, since, level_s, previous_s, self.baseline, evidence)

    def _recover(self, iteration: int) -> None:
        self.state = State.HEALTHY
        self._baseline = None
        self._damper.recovered(iteration)

    def _look_for_creeping(self, iteration: int, action_s: float) -> Change | None:
        """A level that rises too slowly for any iteration to stand out is held against the lowest there was."""
        if self.state is not State.HEALTHY or len(self.window) < self._settings.baseline_iterations // 2:
            return None
        if self._lowest is not None:
            rise_s = self.window.value - self._lowest.value
            if 0.0 <= rise_s <= 2.0 * self._changes.material_s(self._lowest.value, action_s):
                return None
        level = self.window.level()
        if self._lowest is None or level.value < self._lowest.value:
            self._lowest = level
        lowest = self._lowest
        margin_s = 2.0 * max(self._changes.material_s(lowest.value, action_s), lowest.spread)
        if level.value <= lowest.value + margin_s:
            return None
        self._baseline, self._healthy_window = lowest, Window(self._settings.baseline_iterations)
        evidence = ("risen slowly since iteration ", lowest.until_iteration)
        return self._fall(iteration, lowest.until_iteration, level.value, lowest.value, evidence)


# Findings in words.

SETTLED = "as in its first iterations"
UNJUDGED = "too few iterations to judge"


def seconds(value_s: float) -> str:
    """In milliseconds, to three digits."""
    return f"{value_s * 1e3:.3g} ms"


def size(nbytes: float) -> str:
    """In the largest binary unit that leaves at least one."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**exponent:
            return f"{nbytes / 1024**exponent:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def change_in_words(what: str, change: Change, state_since: int) -> Reason:
    """Such as `a message of 4 MiB takes 32 ms, before 2 ms (baseline of 20 iterations: 2 ms); seen in ...`.

    `state_since`: the iteration since when the state is what the finding says, which is not said again.
    """
    again = " again" if change.before is State.SLOW and change.state is State.HEALTHY else ""
    since = (" since iteration ", change.since_iteration) if change.since_iteration != state_since else ()
    before = f"{'others' if change.of_others else 'before'} {seconds(change.previous_s)}"
    behind: tuple[Reason, ...] = ()
    if change.learnt_slow:
        before = f"{seconds(change.previous_s)} when it was first measured, while the link was slow already"
    elif not change.of_others and State.SLOW in (change.before, change.state):
        healthy = change.baseline
        text = f" (baseline {seconds(healthy.value)}, of {healthy.iterations} iterations up to "
        behind = ((text, healthy.until_iteration, ")"),)
    seen = ("; seen in ", change.evidence)
    return (f"{what} takes {seconds(change.level_s)}{again}", *since, f", {before}", *behind, seen)
