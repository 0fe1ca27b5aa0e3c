# SPDX-License-Identifier: Apache-2.0
"""Change points of one measured quantity, with hysteresis: healthy or slow."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.detector.detector_settings import ChangeSettings, DetectorSettings
from adaptra_megatron.control.detector.levels import Batch, Level, Window
from adaptra_megatron.control.detector.link_findings import State

# Flap damping: each relapse soon after a recovery lengthens the time until the next one counts.


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
