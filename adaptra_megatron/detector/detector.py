# SPDX-License-Identifier: Apache-2.0
"""The detector of a job: fed with each iteration's measurements, it says what has changed and what things are like."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from adaptra_megatron.detector.clock_errors import clock_corrections
from adaptra_megatron.detector.findings import Estimates, Finding
from adaptra_megatron.detector.links import LinkTracker
from adaptra_megatron.detector.peers import Place, declare_slow_beside_peers
from adaptra_megatron.detector.samples import IterationSample, LinkId, StageId
from adaptra_megatron.detector.series import Change, Series
from adaptra_megatron.detector.settings import ChangeSettings, DetectorSettings
from adaptra_megatron.detector.sizes import SizeModel
from adaptra_megatron.detector.stages import KindAndChunk, StageTracker


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
        self._compared: set[Place] = set()
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
            Place(identity.pipeline, identity.stage, key, tracker.work[key[1]] if tracker.work else None): series
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
            Place(identity.pipeline, (identity.source, identity.target), identity.path): tracker.series
            for identity, tracker in self._links.items()
            if tracker.series.settled
        }
        findings = []
        for place, change in sorted(self._compare(settled, self._settings.link, iteration)):
            source, target = place.position
            findings.append(self._links[LinkId(place.pipeline, source, target, place.sort)].report(iteration, change))
        return findings

    def _compare(
        self, settled: Mapping[Place, Series], changes: ChangeSettings, iteration: int
    ) -> list[tuple[Place, Change]]:
        new = [place for place in settled if place not in self._compared]
        self._compared.update(new)
        return list(declare_slow_beside_peers(settled, new, changes, iteration, self._action_s).items())
