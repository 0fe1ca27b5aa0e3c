# SPDX-License-Identifier: Apache-2.0
"""The detector of a job: fed with each iteration's measurements, it says what has changed and what things are like."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.control.detector import series as words
from adaptra_megatron.control.detector.detector_settings import ChangeSettings, DetectorSettings
from adaptra_megatron.control.detector.link_findings import Estimates, Finding, State
from adaptra_megatron.control.detector.link_series import LinkTracker
from adaptra_megatron.control.detector.samples import IterationSample, LinkId, LinkSample, StageId, StageSample
from adaptra_megatron.control.detector.series import Change, Series
from adaptra_megatron.control.detector.stages import KindAndChunk, StageTracker

# Compares like with like where micro-batches are of different lengths: a stage that had more to do is not slow.

Array = npt.NDArray[np.floating[Any]]
_Sort = tuple[int, str, int]
"""Stage, kind of action and chunk: what grows with the length alike in all pipelines."""
_PROPORTIONAL, _QUADRATIC = 1.0, 2.0
_ENOUGH = 0.1
"""Sum of squared logarithms of relative sizes from which on it is known how durations grow."""


class SizeModel:
    """Growth of durations with the size of what is computed: as a power of it, between not at all and quadratically.

    The power is the slope of log(duration) over log(size) among the actions of each stage's iteration, by least
    squares over all iterations and pipelines: how fast a stage is moves its actions alike and does not count. Until
    sizes have differed within iterations, durations are taken to be proportional to them.
    """

    def __init__(self) -> None:
        self._usual: float | None = None
        """Size that durations are brought to: the median of the first iteration."""
        self._products: dict[_Sort, float] = defaultdict(float)
        self._squares: dict[_Sort, float] = defaultdict(float)

    def alike(self, sample: IterationSample) -> IterationSample:
        """`sample` with the durations that actions of the usual size would have had; learns from it unless something
        has disturbed it."""
        known = [np.asarray(sizes) for stage in sample.stages.values() for sizes in stage.sizes.values()]
        if not known:
            return sample
        together = np.concatenate(known)
        if self._usual is None:
            self._usual = float(np.median(together))
        if (together == self._usual).all():
            return sample
        if sample.disturbance is None:
            for identity, stage in sample.stages.items():
                self._learn(identity, stage)
        stages = {identity: self._of_usual_size(identity, stage) for identity, stage in sample.stages.items()}
        return dataclasses.replace(sample, stages=stages)

    def power(self, sort: _Sort) -> float:
        """The power of the size that durations of these actions grow with."""
        if self._squares[sort] < _ENOUGH:
            return _PROPORTIONAL
        return min(max(self._products[sort] / self._squares[sort], 0.0), _QUADRATIC)

    def _learn(self, identity: StageId, stage: StageSample) -> None:
        for (kind, chunk), given in stage.sizes.items():
            sizes, durations_s = np.asarray(given), np.asarray(stage.durations_s.get((kind, chunk), ()))
            if len(sizes) < 2 or len(sizes) != len(durations_s) or min(sizes.min(), durations_s.min()) <= 0:
                continue
            larger, longer = np.log(sizes), np.log(durations_s)
            larger -= larger.mean()
            sort = identity.stage, kind, chunk
            self._products[sort] += float(larger @ longer)
            self._squares[sort] += float(larger @ larger)

    def _of_usual_size(self, identity: StageId, stage: StageSample) -> StageSample:
        assert self._usual is not None, "sizes are known"
        found = dict(stage.durations_s)
        for (kind, chunk), given in stage.sizes.items():
            sizes = np.asarray(given, dtype=np.float64)
            if (kind, chunk) in found and sizes.min() > 0:
                scale = (self._usual / sizes) ** self.power((identity.stage, kind, chunk))
                found[kind, chunk] = np.asarray(found[kind, chunk]) * scale
        return dataclasses.replace(stage, durations_s=found)


# What was slow from the start cannot be told from its own past: it is compared with its peers.

_MIN_REPLICAS = 2
_MIN_OTHERS = 3


class DetectorPlace(NamedTuple):
    """Place that a series belongs to."""

    pipeline: int
    position: Any
    """The same in pipelines that do the same work."""
    sort: Any
    """Series of different sorts (paths; kinds of actions) are never compared."""
    work: Any = None
    """What it does: those of different positions are only compared where it is the same."""


def declare_slow_beside_peers(
    settled: Mapping[DetectorPlace, Series],
    newly_settled: Iterable[DetectorPlace],
    changes: ChangeSettings,
    iteration: int,
    action_s: float,
) -> dict[DetectorPlace, Change]:
    """Declare those of `newly_settled` slow that are far above the median of their peers.

    Peers are the same position of the other pipelines, or, where those are too few, the other positions that do the
    same work: in an uneven pipeline (layouts, multi-token prediction) a stage with more layers is not slow.
    """
    newly_settled = list(newly_settled)
    if not newly_settled:
        return {}
    levels_s = {place: series.window.level().value for place, series in settled.items()}
    declared: dict[DetectorPlace, Change] = {}
    for place in newly_settled:
        alike = {other: level_s for other, level_s in levels_s.items() if other.sort == place.sort and other != place}
        peers = [level_s for other, level_s in alike.items() if other.position == place.position]
        factor, who = changes.replica_factor, f"the same of {len(peers)} other pipelines"
        if len(peers) < _MIN_REPLICAS:
            own = [other for other in alike if (other.pipeline, other.work) == (place.pipeline, place.work)]
            peers = [alike[other] for other in own]
            factor, who = changes.peer_factor, f"{len(peers)} others of its pipeline"
            if len(peers) < _MIN_OTHERS:
                continue
        series, usual_s = settled[place], statistics.median(peers)
        excess_s = levels_s[place] - usual_s
        if series.state is State.SLOW or levels_s[place] <= factor * usual_s:
            continue
        if excess_s >= changes.material_s(usual_s, action_s):
            evidence = f"comparison with {who}, at {words.seconds(usual_s)}"
            declared[place] = series.declare_slow(max(0.0, usual_s), iteration, evidence)
    return declared


# Clocks that have drifted apart look like a slow link one way, and a link faster than light the other way.

HostPair = tuple[int, int, int]
"""Pipeline, and the two stages in the order of the link."""


def clock_corrections(links: Mapping[LinkId, LinkSample], min_messages: int) -> dict[HostPair, float]:
    """Seconds to take off the one-way times of each pair's links, of whatever path.

    Only what must be wrong is corrected: by the amount by which the typical time of the other direction is negative.
    """
    impossible_s: dict[HostPair, float] = {}
    for link, sample in links.items():
        messages = sample.messages
        delays_s = (messages.arrived_s - messages.sent_s)[messages.arrived & messages.awaited]
        if len(delays_s) >= min_messages:
            pair = link.pipeline, link.source, link.target
            middle = len(delays_s) // 2
            impossible_s[pair] = max(impossible_s.get(pair, 0.0), -float(np.partition(delays_s, middle)[middle]))
    corrections: dict[HostPair, float] = {}
    for (pipeline, source, target), seconds in impossible_s.items():
        if seconds > 0.0:
            for pair, shift_s in (((pipeline, target, source), seconds), ((pipeline, source, target), -seconds)):
                corrections[pair] = corrections.get(pair, 0.0) + shift_s
    return corrections


class Detector:
    """Deterministic: the same samples give the same findings. Not safe for threads."""

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self._settings = settings if settings is not None else DetectorSettings()
        self._sizes = SizeModel()
        self._links: dict[LinkId, LinkTracker] = {}
        self._stages: dict[StageId, StageTracker] = {}
        self._observed = 0
        self._iteration: int | None = None
        self._action_s = 0.0
        """The latest median over all kinds of actions of all stages, about."""
        self._compared: set[DetectorPlace] = set()
        """Whose first level has been compared with their peers'."""

    def observe(self, sample: IterationSample) -> list[Finding]:
        """Take one iteration in; what changed, stages first, in order of their names.

        Durations count as those of actions of the usual size, where sizes are known. Iterations come in ascending
        order, gaps allowed. Raises ValueError otherwise.
        """
        if self._iteration is not None and sample.iteration <= self._iteration:
            raise ValueError(f"iteration {sample.iteration} was observed after iteration {self._iteration}")
        self._iteration = sample.iteration
        self._observed += 1
        sample = self._sizes.alike(sample)
        disturbed = sample.disturbance is not None or self._observed <= self._settings.ignored_iterations
        if not disturbed:
            self._note_action_time(sample)
        return [
            *self._observe_stages(sample, disturbed),
            *self._compare_stages(sample.iteration),
            *self._observe_links(sample, disturbed),
            *self._compare_links(sample.iteration),
        ]

    def estimates(self) -> Estimates:
        """Present estimates of everything that was ever measured."""
        links = {identity: tracker.estimate() for identity, tracker in sorted(self._links.items())}
        stages = {identity: tracker.estimate() for identity, tracker in sorted(self._stages.items())}
        return Estimates(
            {identity: estimate for identity, estimate in links.items() if estimate is not None},
            {identity: estimate for identity, estimate in stages.items() if estimate is not None},
        )

    def _note_action_time(self, sample: IterationSample) -> None:
        medians_s = [
            float(np.partition(durations_s, len(durations_s) // 2)[len(durations_s) // 2])
            for stage in sample.stages.values()
            for durations_s in stage.durations_s.values()
            if len(durations_s)
        ]
        if medians_s:
            self._action_s = statistics.median(medians_s)

    def _observe_stages(self, sample: IterationSample, disturbed: bool) -> list[Finding]:
        findings = []
        for identity, stage in sorted(sample.stages.items()):
            tracker = self._stages.setdefault(identity, StageTracker(identity, self._settings))
            findings.append(tracker.observe(sample.iteration, stage, action_s=self._action_s, disturbed=disturbed))
        return [finding for finding in findings if finding is not None]

    def _observe_links(self, sample: IterationSample, disturbed: bool) -> list[Finding]:
        findings = []
        corrections = clock_corrections(sample.links, self._settings.min_messages)
        for identity, link in sorted(sample.links.items()):
            tracker = self._links.setdefault(identity, LinkTracker(identity, self._settings))
            finding = tracker.observe(
                sample.iteration,
                link,
                clock_correction_s=corrections.get((identity.pipeline, identity.source, identity.target), 0.0),
                action_s=self._action_s,
                disturbed=disturbed,
                slow_since=self._slow_since(identity),
            )
            findings.append(finding)
        return [finding for finding in findings if finding is not None]

    def _slow_since(self, identity: LinkId) -> int | None:
        """Since when another path of this link, or one of the other direction, is not healthy; None: all are."""
        source, target = identity.source, identity.target
        ends = ((source, target), (target, source))
        others = [
            tracker.slow_since
            for other, tracker in self._links.items()
            if other != identity and other.pipeline == identity.pipeline and (other.source, other.target) in ends
        ]
        return min((since for since in others if since is not None), default=None)

    def _compare_stages(self, iteration: int) -> list[Finding]:
        settled = {
            DetectorPlace(
                identity.pipeline, identity.stage, key, tracker.work[key[1]] if tracker.work else None
            ): series
            for identity, tracker in self._stages.items()
            for key, series in tracker.series.items()
            if series.settled
        }
        changes: dict[StageId, dict[KindAndChunk, Change]] = defaultdict(dict)
        before = {identity: tracker.state for identity, tracker in self._stages.items()}
        for place, change in self._compare(settled, self._settings.stage, iteration):
            changes[StageId(place.pipeline, place.position)][place.sort] = change
        return [
            self._stages[identity].report(iteration, before[identity], changed)
            for identity, changed in sorted(changes.items())
        ]

    def _compare_links(self, iteration: int) -> list[Finding]:
        settled = {
            DetectorPlace(identity.pipeline, (identity.source, identity.target), identity.path): tracker.series
            for identity, tracker in self._links.items()
            if tracker.series.settled
        }
        findings = []
        for place, change in sorted(self._compare(settled, self._settings.link, iteration)):
            source, target = place.position
            findings.append(self._links[LinkId(place.pipeline, source, target, place.sort)].report(iteration, change))
        return findings

    def _compare(
        self, settled: Mapping[DetectorPlace, Series], changes: ChangeSettings, iteration: int
    ) -> list[tuple[DetectorPlace, Change]]:
        new = [place for place in settled if place not in self._compared]
        self._compared.update(new)
        return list(declare_slow_beside_peers(settled, new, changes, iteration, self._action_s).items())
