# SPDX-License-Identifier: Apache-2.0
"""One stage over the iterations: how long its actions take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.detector import series as words
from adaptra_megatron.control.detector.detector_settings import DetectorSettings
from adaptra_megatron.control.detector.levels import Batch
from adaptra_megatron.control.detector.link_findings import Finding, StageEstimate, State
from adaptra_megatron.control.detector.samples import StageId, StageSample
from adaptra_megatron.control.detector.series import Change, FlapDamper, Series

KindAndChunk = tuple[str, int]


class StageTracker:
    """Follows each kind of action of each chunk; slow if any of them is."""

    def __init__(self, identity: StageId, settings: DetectorSettings) -> None:
        self.identity = identity
        self._settings = settings
        self.series: dict[KindAndChunk, Series] = {}
        self.work: Sequence[str] = ()
        """See StageSample."""
        self._dead = False
        self._slow: dict[KindAndChunk, Change] = {}
        """The last change of each kind of action that is slow."""
        self._since, self._state_since = 0, 0
        self._reason: Reason = words.UNJUDGED

    @property
    def state(self) -> State:
        if self._dead:
            return State.DEAD
        slow = any(series.state is State.SLOW for series in self.series.values())
        return State.SLOW if slow else State.HEALTHY

    def observe(self, iteration: int, sample: StageSample, *, action_s: float, disturbed: bool) -> Finding | None:
        """Judge an iteration. A lost stage is dead until it measures again."""
        before, self.work = self.state, sample.work or self.work
        if sample.lost is not None:
            self._dead = True
            self._since, self._reason = iteration, sample.lost
            return None if before is State.DEAD else self._finding(iteration, before, None, None)
        if disturbed or not any(len(durations_s) for durations_s in sample.durations_s.values()):
            return None
        changes: dict[KindAndChunk, Change] = {}
        for key, durations_s in sample.durations_s.items():
            if len(durations_s):
                series = self._series(key)
                change = series.observe(Batch(iteration, np.asarray(durations_s, dtype=np.float64)), action_s)
                if change is not None:
                    changes[key] = change
        if changes:
            self._dead = False
            return self.report(iteration, before, changes)
        if self._dead:
            self._dead = False
            self._since, self._reason = iteration, "it computes again"
            return self._finding(iteration, before, None, None)
        return None

    def report(self, iteration: int, before: State, changes: Mapping[KindAndChunk, Change]) -> Finding:
        """Changes of one iteration as one finding. A stage that is slow is described by what is slow of it."""
        known = {**self._slow, **changes}
        self._slow = {key: known[key] for key, series in sorted(self.series.items()) if series.state is State.SLOW}
        told = {key: change for key, change in changes.items() if key in self._slow} or changes
        self._since = min(change.since_iteration for change in told.values())
        self._enter(before)
        first, *others = (
            words.change_in_words(_name(key), change, self._state_since)
            for key, change in {**self._slow, **dict(sorted(changes.items()))}.items()
        )
        self._reason = *first, *(("; ", other) for other in others)
        if self._slow:
            worst = max(self._slow.values(), key=lambda change: change.level_s - change.baseline.value)
        else:
            worst = max(changes.values(), key=lambda change: abs(change.level_s - change.previous_s))
        return self._finding(iteration, before, worst.level_s, worst.baseline.value)

    def estimate(self) -> StageEstimate | None:
        """None while nothing was measured."""
        known = {key: series.window for key, series in self.series.items() if len(series.window)}
        if not known:
            return None
        return StageEstimate(
            durations_s={
                key: window.latest_quantile(0.5, self._settings.estimate_iterations) for key, window in known.items()
            },
            state=self.state,
            since_iteration=self._since,
            reason=words.SETTLED
            if self._reason is words.UNJUDGED and _all_settled(self.series.values())
            else self._reason,
        )

    def _series(self, key: KindAndChunk) -> Series:
        if key not in self.series:
            self.series[key] = Series(self._settings, self._settings.stage, FlapDamper(self._settings))
        return self.series[key]

    def _enter(self, before: State) -> None:
        if self.state is not before:
            self._state_since = self._since

    def _finding(self, iteration: int, before: State, level_s: float | None, baseline_s: float | None) -> Finding:
        self._enter(before)
        return Finding(
            iteration=iteration,
            subject=self.identity,
            before=before,
            state=self.state,
            since_iteration=self._since,
            state_since_iteration=self._state_since,
            level_s=level_s,
            baseline_s=baseline_s,
            why=self._reason,
        )


def _all_settled(series: Iterable[Series]) -> bool:
    return all(one.settled for one in series)


def _name(key: KindAndChunk) -> str:
    kind, chunk = key
    return f"{kind} of chunk {chunk}"
