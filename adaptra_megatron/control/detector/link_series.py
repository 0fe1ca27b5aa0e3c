# SPDX-License-Identifier: Apache-2.0
"""One path of one directed link over the iterations."""

from __future__ import annotations

from collections import deque

import numpy as np

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.detector import series as words
from adaptra_megatron.control.detector.detector_settings import DetectorSettings
from adaptra_megatron.control.detector.levels import Array, Batch, LinkFit, Messages, fit_link, least_held
from adaptra_megatron.control.detector.link_findings import Finding, LinkEstimate, State
from adaptra_megatron.control.detector.samples import LinkId, LinkSample, MessageColumns
from adaptra_megatron.control.detector.series import Change, FlapDamper, Series


class LinkTracker:
    """Follows the transfer time of a message of the usual size, and whether messages arrive at all."""

    def __init__(self, identity: LinkId, settings: DetectorSettings) -> None:
        self.identity = identity
        self._settings = settings
        self._damper = FlapDamper(settings)
        self.series = Series(settings, settings.link, self._damper)
        self._dead = False
        self._alive_streak, self._alive_since = 0, 0
        self._since, self._state_since = 0, 0
        self._reason: Reason = words.UNJUDGED
        self._nbytes = 0
        """The usual message."""
        self._seconds_per_byte: deque[float] = deque(maxlen=settings.estimate_iterations)
        """What the latest iterations of this level told; 0 from those that are explained best without a bandwidth."""
        self._clock_correction_s = 0.0

    @property
    def state(self) -> State:
        return State.DEAD if self._dead else self.series.state

    @property
    def slow_since(self) -> int | None:
        """The first iteration of the present state; None of the healthy."""
        return None if self.state is State.HEALTHY else self._state_since

    def observe(
        self,
        iteration: int,
        sample: LinkSample,
        *,
        clock_correction_s: float,
        action_s: float,
        disturbed: bool,
        slow_since: int | None = None,
    ) -> Finding | None:
        """Judge an iteration. `clock_correction_s` is taken off all measured times. `slow_since`: the first iteration
        since when the other path or direction of the link is not healthy; None: all are."""
        count = len(sample.messages.sent_s)
        lost = count - int(np.count_nonzero(sample.messages.arrived))
        if sample.broken is not None:
            return self._die(iteration, f"the transport gave it up: {sample.broken}")
        if lost >= self._settings.min_messages and 2 * lost >= count:
            return self._die(iteration, f"{lost} of {count} messages did not arrive by it")
        if disturbed:
            return None
        messages = _messages(sample, clock_correction_s)
        if messages is None or np.count_nonzero(messages.telling) < self._settings.min_messages:
            return None
        self._clock_correction_s = clock_correction_s
        fit = fit_link(messages, self._known_rate())
        values = self._transfers(messages, fit)
        change = None if values is None else self.series.observe(Batch(iteration, values), action_s)
        if change is not None:
            self._seconds_per_byte.clear()
            healthy = change.baseline
            first = healthy.until_iteration - healthy.iterations + 1
            change = change._replace(learnt_slow=slow_since is not None and slow_since <= first)
        if (fit.identified or fit.seconds_per_byte == 0.0) and self.series.accepted(iteration):
            self._seconds_per_byte.append(fit.seconds_per_byte)
        if self._dead:
            return self._revive(iteration)
        return None if change is None else self.report(iteration, change)

    def report(self, iteration: int, change: Change) -> Finding:
        """A change of the series as a finding."""
        self._since = change.since_iteration
        if change.state is not change.before:
            self._state_since = self._since
        self._reason = words.change_in_words(f"a message of {words.size(self._nbytes)}", change, self._state_since)
        if (rate := self._known_rate()) is not None:
            self._reason = *self._reason, (f"; the link carries {words.size(1.0 / rate)} per second",)
        return Finding(
            iteration=iteration,
            subject=self.identity,
            before=change.before,
            state=change.state,
            since_iteration=change.since_iteration,
            state_since_iteration=self._state_since,
            level_s=change.level_s,
            baseline_s=change.baseline.value,
            why=self._reason,
        )

    def estimate(self) -> LinkEstimate | None:
        """None while no iteration has told anything."""
        until_iteration = self.series.window.until_iteration
        if until_iteration is None:
            return None
        settings = self._settings
        transfer_s = max(
            0.0, self.series.window.latest_quantile(settings.planning_quantile, settings.estimate_iterations)
        )
        rate = self._known_rate()
        occupancy_s = 0.0 if rate is None else rate * self._nbytes
        return LinkEstimate(
            latency_s=max(0.0, transfer_s - occupancy_s),
            bandwidth_bytes_per_s=None if rate is None else 1.0 / rate,
            transfer_s=transfer_s,
            nbytes=self._nbytes,
            state=self.state,
            since_iteration=self._since,
            measured_iteration=until_iteration,
            reason=words.SETTLED if self._reason is words.UNJUDGED and self.series.settled else self._reason,
            clock_correction_s=self._clock_correction_s,
        )

    def _transfers(self, messages: Messages, fit: LinkFit) -> Array | None:
        """Seconds each telling message would have taken on the idle link, had it been of the usual size.

        None if it cannot be said: sizes have changed, and nothing tells the bandwidth.
        """
        sizes = messages.nbytes[messages.telling]
        if self._nbytes == 0:
            self._nbytes = int(np.median(sizes))
        if fit.seconds_per_byte > 0.0:
            return fit.latency_s + fit.seconds_per_byte * self._nbytes
        usual = np.abs(sizes - self._nbytes) <= self._settings.size_tolerance * self._nbytes
        if np.count_nonzero(usual) >= self._settings.min_messages:
            return np.asarray(fit.latency_s[usual])
        if self._dead or self.series.state is not State.HEALTHY:
            return None  # probes, say
        self._nbytes = int(np.median(sizes))
        self.series.forget()
        return fit.latency_s

    def _known_rate(self) -> float | None:
        """Seconds per byte, if most iterations that told anything told one: arrivals may be spaced by chance once."""
        told = [rate for rate in self._seconds_per_byte if rate > 0.0]
        return float(np.median(told)) if 2 * len(told) > len(self._seconds_per_byte) else None

    def _die(self, iteration: int, reason: str) -> Finding | None:
        self._alive_streak = 0
        if self._dead:
            return None
        before, self._dead = self.state, True
        if before is State.HEALTHY:
            self._damper.fell(iteration)
        self._since, self._reason = iteration, reason
        return self._finding(iteration, before, None)

    def _revive(self, iteration: int) -> Finding | None:
        """It carries messages again; once it has done so for long enough, it is as slow or healthy as they say."""
        if self._alive_streak == 0:
            self._alive_since = iteration
        self._alive_streak += 1
        if self._alive_streak < self._damper.hold_iterations:
            return None
        self._dead = False
        if self.state is State.HEALTHY:
            self._damper.recovered(iteration)
        self._since = self._alive_since
        self._reason = f"messages have arrived by it again for {self._alive_streak} iterations"
        return self._finding(iteration, State.DEAD, self.series.window.level().value)

    def _finding(self, iteration: int, before: State, level_s: float | None) -> Finding:
        known = len(self.series.window) > 0
        if self.state is not before:
            self._state_since = self._since
        return Finding(
            iteration=iteration,
            subject=self.identity,
            before=before,
            state=self.state,
            since_iteration=self._since,
            state_since_iteration=self._state_since,
            level_s=level_s,
            baseline_s=self.series.baseline.value if known else None,
            why=self._reason,
        )


def _messages(sample: LinkSample, clock_correction_s: float) -> Messages | None:
    """Return those that arrived, in the order in which they were sent; None if there are none."""
    given = sample.messages
    arrived = given.arrived
    if not (arrived.all() and (given.sent_s[1:] > given.sent_s[:-1]).all()):
        order = np.lexsort((given.nbytes, given.sent_s))
        order = order[arrived[order]]
        given = MessageColumns(*(column[order] for column in given))
    if not len(given.sent_s):
        return None
    start_s = np.fmax(given.sent_s, given.posted_s)
    arrived_s = given.arrived_s - clock_correction_s
    return Messages(given.nbytes, start_s, arrived_s, given.awaited & least_held(start_s, arrived_s))
