# SPDX-License-Identifier: Apache-2.0
"""Find change points of one measured quantity, with hysteresis and robust statistics. Fit a link's bandwidth.

A link carries one message at a time, in order. Message i starts when it was sent or when the one before has left,
whichever is later. Its bytes take nbytes / bandwidth; it arrives one latency after its last byte left. Given a
bandwidth, each message yields a latency. The right bandwidth is the one for which these latencies agree best. It can
be found if messages waited for each other, or if their sizes differ.
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
"""Minimum number of messages that a bandwidth is fitted to."""
TELLING = 0.7
"""A fitted bandwidth is used if it reduces the spread of the latencies to at most this share."""
OUTLIERS = 0.1
"""Share of the messages that the spread leaves out: the farthest ones."""
CANDIDATES = 16
_NEGLIGIBLE = 0.01
"""Share of the occupancy. Latencies that disagree by less need no bandwidth to explain them."""
_NEGATIVE = 0.1
"""Share of the occupancy. A bandwidth that makes latencies more negative than this is impossible."""
_SIZES_DIFFER = 1.2
_TOGETHER = 0.25
"""Messages belong to one bunch if their arrivals are closer than this share of the time between their sending."""


class Messages(NamedTuple):
    """Messages of a link in one iteration, in the order in which they were sent, without lost ones."""

    nbytes: Array
    start_s: Array
    """Earliest possible start of each: when it was sent or, if that matters, when its receive was posted."""
    arrived_s: Array
    telling: npt.NDArray[np.bool_]
    """Which messages yield a latency; the others only kept the link busy."""


def least_held(start_s: Array, arrived_s: Array) -> npt.NDArray[np.bool_]:
    """Return which messages were not held up and released together with a later one.

    A pause of the receiver, or one late message on an ordered link, delays many messages at once, which then arrive
    together. They are evidence of one event, and the last of them was held up least.
    """
    arrivals_apart = arrived_s[1:] - arrived_s[:-1]
    together = (arrivals_apart >= 0.0) & (arrivals_apart < _TOGETHER * (start_s[1:] - start_s[:-1]))
    return np.append(~together, True)


class LinkFit(NamedTuple):
    """Latencies and bandwidth fitted to a link's messages of one iteration."""

    latency_s: Array
    """One per message with a known latency; if the bandwidth is unknown, the time of the bytes is included."""
    seconds_per_byte: float
    identified: bool
    """Whether `seconds_per_byte` was found in this iteration; if not, it is the known one, or 0."""


def fit_link(messages: Messages, known_seconds_per_byte: float | None) -> LinkFit:
    """Return the fit that explains the arrivals best. `known_seconds_per_byte`: found in earlier iterations; None if
    not."""
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
    """Return latencies in seconds: one row per candidate, one column per message that yields one."""
    occupancy_s = seconds_per_byte[:, None] * messages.nbytes[None, :]
    busy_s = np.cumsum(occupancy_s, axis=1)
    # start_i = max(earliest_i, left_{i-1}), unrolled: when the link would be free if it had never idled before j.
    left_s = busy_s + np.maximum.accumulate(messages.start_s - (busy_s - occupancy_s), axis=1)
    return (messages.arrived_s - left_s)[:, messages.telling]


def _scores(messages: Messages, seconds_per_byte: Array) -> Array:
    """Return by candidate the mean distance of latencies from their median, without outliers; infinite if latencies
    are negative.

    For a candidate of 0 it is finite: if latencies are negative even without occupancy, clocks differ.
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
    """Return candidates in seconds per byte, ascending from 0: from spacings of arrivals, and from slopes over
    sizes."""
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
"""Values kept per iteration; of more values, evenly spaced ones in order of size."""
_SCALE = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation."""
_ENOUGH_ITERATIONS = 5
"""Minimum number of iterations from which the scatter of medians is computed."""


def quantiles(ordered: Sequence[float], *fractions: float) -> list[float]:
    """Return quantiles of values in ascending order, as np.quantile does, at a twentieth of its cost for short
    lists."""
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
    """Return the indices of the values that are kept of `count`."""
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
    """Ninetieth percentile of all values."""
    spread: float
    """Interquartile range of all values."""
    scatter: float
    """Standard deviation of the iterations' medians, from their median absolute deviation; 0 for few iterations."""
    iterations: int
    until_iteration: int
    values: int
    """Number of values in all these iterations."""

    @property
    def error(self) -> float:
        """Expected standard deviation of `value`."""
        return max(self.scatter / math.sqrt(self.iterations), self.spread / math.sqrt(self.values))

    def noise(self, count: int) -> float:
        """Return the expected standard deviation of the median of `count` values.

        It is at least what the spread of the values makes likely: for normal and exponential noise, that is within a
        tenth of interquartile range / sqrt(count).
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
        """The latest iteration in the window; None if it is empty."""
        return self._batches[-1].iteration if self._batches else None

    def add(self, batch: Batch) -> None:
        """Add an iteration. The oldest leaves when the window is full."""
        self._batches.append(batch)
        self._value = self._level = None

    @property
    def value(self) -> float:
        """Value of the level alone: most iterations need no more, and it costs less."""
        if self._value is None:
            (self._value,) = quantiles(sorted(batch.median for batch in self._batches), 0.5)
        return self._value

    def level(self) -> Level:
        """Return the level of all iterations in the window, at least one."""
        if self._level is None:
            value, count = self.value, len(self._batches)
            values = np.sort(self._values(count)).tolist()
            low, lower, upper, high = quantiles(values, 0.1, 0.25, 0.75, 0.9)
            scatter = 0.0
            if count >= _ENOUGH_ITERATIONS:
                scatter = _SCALE * quantiles(sorted(abs(batch.median - value) for batch in self._batches), 0.5)[0]
            until = self._batches[-1].iteration
            self._level = Level(value, low, high, upper - lower, scatter, count, until, len(values))
        return self._level

    def latest_quantile(self, fraction: float, iterations: int) -> float:
        """Return the smallest value that at least `fraction` of the values of the latest `iterations` do not exceed."""
        values = self._values(iterations)
        place = max(0, math.ceil(fraction * len(values)) - 1)
        return float(np.partition(values, place)[place])

    def _values(self, iterations: int) -> Array:
        return np.concatenate([batch.values for batch in list(self._batches)[-iterations:]])


class FlapDamper:
    """Flap damping of a link or stage: each relapse soon after a recovery lengthens the hold time of the next
    recovery."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._recovered: int | None = None
        self.flaps = 0
        """Relapses in a row, each soon after the recovery before."""

    def fell(self, iteration: int) -> None:
        """Note that it is no longer healthy."""
        soon = self._recovered is not None and iteration - self._recovered <= self._settings.flap_iterations
        self.flaps = self.flaps + 1 if soon else 0

    def recovered(self, iteration: int) -> None:
        """Note that it is healthy again."""
        self._recovered = iteration

    @property
    def hold_iterations(self) -> int:
        """Number of consecutive iterations that must show a recovery before it counts."""
        doublings = min(self.flaps, self._settings.longest_hold_iterations.bit_length())
        return max(
            self._settings.confirm_iterations,
            min(self._settings.longest_hold_iterations, self._settings.confirm_iterations << doublings),
        )


class Change(NamedTuple):
    """A new level, or a new state at the present level."""

    before: State
    state: State
    since_iteration: int
    level_s: float
    previous_s: float
    baseline: Level
    evidence: Reason
    of_others: bool = False
    """`previous_s` and `baseline` are those of its peers: it has no healthy past of its own."""
    learnt_slow: bool = False
    """The baseline was measured while the other path or direction of the link was already slow."""


class _Verdict(NamedTuple):
    """Comparison of one iteration with the present level."""

    direction: int
    """1 slower, -1 faster, 0 the same."""
    overwhelming: bool = False


_SAME = _Verdict(0)
_FAR_ABOVE = 4.0
"""Multiple of the smallest shift that counts."""


class Series:
    """One measured quantity in seconds, such as the transfer time of a link; smaller is better.

    An iteration that differs from the present level is held back until others confirm it. If they do not, it is
    dropped, and neither the level nor an estimate ever includes it.
    """

    def __init__(self, settings: DetectorSettings, changes: ChangeSettings, damper: FlapDamper) -> None:
        self.state = State.HEALTHY
        self._settings, self._changes, self._damper = settings, changes, damper
        self.window = Window(settings.baseline_iterations)
        """Values at the present level."""
        self._healthy_window = self.window
        """Values at the latest healthy level, which a recovery returns to."""
        self.settled = False
        """Whether there is a level to compare with."""
        self._baseline: Level | None = None
        """The healthy level, while the present one is slow."""
        self._lowest: Level | None = None
        self._recent: deque[int] = deque(maxlen=settings.recurrence_window)
        self._streak = 0
        self._direction = 0
        self._since = 0

    @property
    def baseline(self) -> Level:
        """The healthy level."""
        return self._baseline if self._baseline is not None else self.window.level()

    def observe(self, batch: Batch, action_s: float) -> Change | None:
        """Judge an iteration; return the change if it confirms one. `action_s`: median seconds of the job's actions."""
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
        """Return whether `iteration` counts as one of the present level."""
        return self.window.until_iteration == iteration

    def declare_slow(self, healthy_s: float, iteration: int, evidence: Reason) -> Change:
        """Declare the present level slow compared with peers. `healthy_s`: the peers' level, as there is no healthy
        past."""
        level = self.window.level()
        # Noise grows with the level: with that of the slow one, it would soon seem healthy.
        spread = level.spread * healthy_s / level.value if healthy_s > 0.0 else 0.0
        self._baseline = level._replace(value=healthy_s, scatter=0.0, spread=spread)
        # All values so far are slow ones, so a recovery starts with none.
        self._healthy_window = Window(self._settings.baseline_iterations)
        return self._fall(iteration, iteration, level.value, healthy_s, evidence)._replace(of_others=True)

    def forget(self) -> None:
        """Start anew: coming values cannot be compared with earlier ones."""
        self.state, self.settled = State.HEALTHY, False
        self.window = self._healthy_window = Window(self._settings.baseline_iterations)
        self._baseline = self._lowest = None
        self._streak = 0
        self._recent.clear()

    def _judge(self, batch: Batch, action_s: float) -> _Verdict:
        changes, value_s = self._changes, self.window.value
        # Most iterations end here: the median alone decides before the level's statistics are computed.
        if self.state is State.HEALTHY and abs(batch.median - value_s) < changes.material_s(value_s, action_s):
            return _SAME
        level = self.window.level()
        margin_s = max(changes.material_s(level.value, action_s), changes.sigmas * level.noise(batch.count))
        shift_s = batch.median - level.value
        # Compared with the healthy level, since the noise of the slow one could hide a recovery.
        if self.state is State.SLOW and batch.median <= self._healthy_limit(batch, action_s):
            return _Verdict(-1, self._overwhelming(batch, level, shift_s))
        if abs(shift_s) < margin_s:
            return _SAME
        return _Verdict(1 if shift_s > 0 else -1, self._overwhelming(batch, level, shift_s))

    def _healthy_limit(self, batch: Batch, action_s: float) -> float:
        """Return the limit below which a slow series counts as healthy again: half-way to what would be called slow.

        In between, the state stays, so that it does not flap. If the level was far above, the limit is nearly as high
        as what would be called slow.
        """
        baseline, changes = self.baseline, self._changes
        noise_s = 0.75 * changes.sigmas * baseline.noise(batch.count)
        material_s = changes.material_s(baseline.value, action_s)
        far_above = self.window.value - baseline.value > _FAR_ABOVE * material_s
        return baseline.value + max((0.9 if far_above else 0.5) * material_s, noise_s)

    def _overwhelming(self, batch: Batch, level: Level, shift_s: float) -> bool:
        """Return whether one iteration is enough: nearly all values lie beyond nearly all known ones, and shifted by
        as much. A pause or a burst of load does not do that."""
        if not self._changes.single_iteration or batch.count < self._settings.overwhelming_messages:
            return False
        # Half the shift: a burst of jitter delays some messages little.
        lowest_s = max(level.high, level.value + 0.5 * shift_s)
        apart = batch.low > lowest_s if shift_s > 0 else batch.high < level.low
        return apart and batch.spread <= max(2.0 * level.spread, 0.25 * abs(shift_s))

    def _confirmation(self, verdict: _Verdict) -> str | None:
        """Return why the change counts now; None if it does not yet."""
        settings, damper = self._settings, self._damper
        slower = verdict.direction > 0
        # After flaps, even an overwhelming recovery has to last.
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
        """Switch to the level that `batch` shows, and return the change."""
        previous_s = self.window.level().value
        if self._direction > 0:
            # A recovery returns to this level.
            if self.state is State.HEALTHY:
                self._healthy_window, self._baseline = self.window, self.window.level()
            self._start_window(Window(self._settings.baseline_iterations), batch)
            return self._fall(batch.iteration, self._since, batch.median, previous_s, evidence)
        before, healthy = self.state, self.baseline
        if before is State.SLOW and batch.median > self._healthy_limit(batch, action_s):
            self._start_window(Window(self._settings.baseline_iterations), batch)
        elif before is State.SLOW:
            # The healthy window continues, so that the baseline does not move with each flap.
            self._start_window(self._healthy_window, batch)
            self._recover(batch.iteration)
        else:
            self._start_window(Window(self._settings.baseline_iterations), batch)
            self._lowest = None
        return Change(before, self.state, self._since, batch.median, previous_s, healthy, evidence)

    def _start_window(self, window: Window, batch: Batch) -> None:
        self.window = window
        # Not the iterations held back before it: they may be of either level.
        self.window.add(batch)
        self._streak = 0
        self._recent.clear()

    def _fall(self, iteration: int, since: int, level_s: float, previous_s: float, evidence: Reason) -> Change:
        before, self.state = self.state, State.SLOW
        # From slow to slower is no relapse.
        if before is State.HEALTHY:
            self._damper.fell(iteration)
        return Change(before, State.SLOW, since, level_s, previous_s, self.baseline, evidence)

    def _recover(self, iteration: int) -> None:
        self.state = State.HEALTHY
        self._baseline = None
        self._damper.recovered(iteration)

    def _look_for_creeping(self, iteration: int, action_s: float) -> Change | None:
        """Return the change to slow if the level has crept up: no iteration stands out, but it is far above the lowest
        level."""
        # The median of a short window is too noisy for small rises.
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


# Wording of findings.

SETTLED = "as in its first iterations"
UNJUDGED = "too few iterations to judge"


def seconds(value_s: float) -> str:
    """Return seconds as text, in milliseconds with three digits."""
    return f"{value_s * 1e3:.3g} ms"


def size(nbytes: float) -> str:
    """Return bytes as text, in the largest binary unit that gives at least one."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**exponent:
            return f"{nbytes / 1024**exponent:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def change_in_words(what: str, change: Change, state_since: int) -> Reason:
    """Describe a change, as `a message of 4 MiB takes 32 ms, before 2 ms (baseline of 20 iterations: 2 ms); seen in
    ...`.

    `state_since`: the iteration that the finding already names as the start of the state; it is not repeated.
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
