# SPDX-License-Identifier: Apache-2.0
"""Detect changes in a job: from each iteration's measurements, tell what is slow, and what is usual.

`LinkTracker` declares a link slow, `StageTracker` a stage, `declare_slower_than_peers` either if it was so from the
start. The rule is that of `Series` (series.py), the thresholds are LINK_CHANGES and STAGE_CHANGES (observations.py),
which no flag sets. `finding_text` (telemetry/log_lines.py) words the finding for the log.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.detector.observations import (
    ChangeSettings,
    DetectorSettings,
    Estimates,
    Finding,
    IterationSample,
    LinkEstimate,
    LinkId,
    LinkSample,
    MessageColumns,
    StageEstimate,
    StageId,
    StageSample,
    State,
)
from adaptra_megatron.control.detector.series import (
    SETTLED,
    UNJUDGED,
    Array,
    Batch,
    Change,
    FlapDamper,
    LinkFit,
    Messages,
    Series,
    change_in_words,
    fit_link,
    least_held,
    seconds,
    size,
)

KindAndChunk = tuple[str, int]


class _Tracker:
    """State of a stage or of one path of a link: since when, and why."""

    def __init__(self, identity: StageId | LinkId, settings: DetectorSettings) -> None:
        self._identity, self._settings = identity, settings
        self._since, self._state_since = 0, 0
        self._reason: Reason = UNJUDGED

    def _enter(self, before: State, state: State) -> None:
        if state is not before:
            self._state_since = self._since

    def _finding(
        self, iteration: int, before: State, state: State, level_s: float | None, baseline_s: float | None
    ) -> Finding:
        """Return the change from `before` to `state` as a finding."""
        self._enter(before, state)
        return Finding(
            iteration=iteration,
            subject=self._identity,
            before=before,
            state=state,
            since_iteration=self._since,
            state_since_iteration=self._state_since,
            level_s=level_s,
            baseline_s=baseline_s,
            why=self._reason,
        )


class StageTracker(_Tracker):
    """State of one stage. Follows each kind of action of each chunk; the stage is slow if any of them is."""

    def __init__(self, identity: StageId, settings: DetectorSettings) -> None:
        super().__init__(identity, settings)
        self.series: dict[KindAndChunk, Series] = {}
        self.work: Sequence[str] = ()
        """Work of each chunk, see StageSample."""
        self._dead = False
        self._slow: dict[KindAndChunk, Change] = {}
        """The last change of each action (kind and chunk) that is slow."""

    @property
    def state(self) -> State:
        if self._dead:
            return State.DEAD
        slow = any(series.state is State.SLOW for series in self.series.values())
        return State.SLOW if slow else State.HEALTHY

    def observe(self, iteration: int, sample: StageSample, *, action_s: float, disturbed: bool) -> Finding | None:
        """Judge an iteration; return a finding if the state or a level has changed. A lost stage is dead until it
        measures again."""
        before, self.work = self.state, sample.work or self.work
        if sample.lost is not None:
            self._dead = True
            self._since, self._reason = iteration, sample.lost
            return None if before is State.DEAD else self._finding(iteration, before, self.state, None, None)
        # What disturbs timings says nothing of the stage.
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
            return self._finding(iteration, before, self.state, None, None)
        return None

    def report(self, iteration: int, before: State, changes: Mapping[KindAndChunk, Change]) -> Finding:
        """Return one iteration's changes as one finding. If the stage is slow, the finding describes its slow
        actions."""
        known = {**self._slow, **changes}
        self._slow = {key: known[key] for key, series in sorted(self.series.items()) if series.state is State.SLOW}
        # While the stage is slow, only its slow actions say since when.
        shown = {key: change for key, change in changes.items() if key in self._slow} or changes
        self._since = min(change.since_iteration for change in shown.values())
        self._enter(before, self.state)
        first, *others = (
            change_in_words(_name(key), change, self._state_since)
            for key, change in {**self._slow, **dict(sorted(changes.items()))}.items()
        )
        self._reason = *first, *(("; ", other) for other in others)
        if self._slow:
            worst = max(self._slow.values(), key=lambda change: change.level_s - change.baseline.value)
        else:
            worst = max(changes.values(), key=lambda change: abs(change.level_s - change.previous_s))
        return self._finding(iteration, before, self.state, worst.level_s, worst.baseline.value)

    def estimate(self) -> StageEstimate | None:
        """Return the present estimate; None if nothing was measured."""
        known = {key: series.window for key, series in self.series.items() if len(series.window)}
        if not known:
            return None
        return StageEstimate(
            durations_s={
                key: window.latest_quantile(0.5, self._settings.estimate_iterations) for key, window in known.items()
            },
            state=self.state,
            since_iteration=self._since,
            reason=SETTLED if self._reason is UNJUDGED and _all_settled(self.series.values()) else self._reason,
        )

    def _series(self, key: KindAndChunk) -> Series:
        if key not in self.series:
            self.series[key] = Series(self._settings, self._settings.stage, FlapDamper(self._settings))
        return self.series[key]


def _all_settled(series: Iterable[Series]) -> bool:
    return all(one.settled for one in series)


def _name(key: KindAndChunk) -> str:
    kind, chunk = key
    return f"{kind} of chunk {chunk}"


class LinkTracker(_Tracker):
    """State of one path of a link. Follows the transfer time of a message of the usual size, and whether messages
    arrive."""

    def __init__(self, identity: LinkId, settings: DetectorSettings) -> None:
        super().__init__(identity, settings)
        self._damper = FlapDamper(settings)
        self.series = Series(settings, settings.link, self._damper)
        self._dead = False
        self._alive_streak, self._alive_since = 0, 0
        self._nbytes = 0
        """Bytes of a usual message."""
        self._seconds_per_byte: deque[float] = deque(maxlen=settings.estimate_iterations)
        """Bandwidths (seconds per byte) found in the latest iterations at this level; 0 for an iteration that is
        explained best without one."""
        self._clock_correction_s = 0.0

    @property
    def state(self) -> State:
        return State.DEAD if self._dead else self.series.state

    @property
    def slow_since(self) -> int | None:
        """First iteration of the present state; None if healthy."""
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
        """Judge an iteration; return a finding if the state or the level has changed. `clock_correction_s` is
        subtracted from all transfer times. `slow_since`: first iteration in which the link's other path or direction
        is not healthy; None if both are."""
        count = len(sample.messages.sent_s)
        lost = count - int(np.count_nonzero(sample.messages.arrived))
        # Before all else: a broken path counts in a disturbed iteration, too.
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
            # They are the level's that is over: its bandwidth may be what has changed.
            self._seconds_per_byte.clear()
            # A path first measured while the link was slow already has a baseline that is not healthy.
            healthy = change.baseline
            first = healthy.until_iteration - healthy.iterations + 1
            change = change._replace(learnt_slow=slow_since is not None and slow_since <= first)
        # A bandwidth taken over from earlier iterations is no evidence for itself.
        if (fit.identified or fit.seconds_per_byte == 0.0) and self.series.accepted(iteration):
            self._seconds_per_byte.append(fit.seconds_per_byte)
        if self._dead:
            return self._revive(iteration)
        return None if change is None else self.report(iteration, change)

    def report(self, iteration: int, change: Change) -> Finding:
        """Return a change of the series as a finding."""
        self._since = change.since_iteration
        self._enter(change.before, change.state)
        self._reason = change_in_words(f"a message of {size(self._nbytes)}", change, self._state_since)
        if (rate := self._known_rate()) is not None:
            self._reason = *self._reason, (f"; the link carries {size(1.0 / rate)} per second",)
        return self._finding(iteration, change.before, change.state, change.level_s, change.baseline.value)

    def estimate(self) -> LinkEstimate | None:
        """Return the present estimate; None if nothing was measured."""
        until_iteration = self.series.window.until_iteration
        if until_iteration is None:
            return None
        settings = self._settings
        # Clocks are only related to within half a round trip, so a quantile can be negative.
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
            reason=SETTLED if self._reason is UNJUDGED and self.series.settled else self._reason,
            clock_correction_s=self._clock_correction_s,
        )

    def _transfers(self, messages: Messages, fit: LinkFit) -> Array | None:
        """Return the seconds that each message with a known latency would have taken on the idle link at the usual
        size.

        None if that is unknown: sizes have changed, and the bandwidth is unknown.
        """
        sizes = messages.nbytes[messages.telling]
        if self._nbytes == 0:
            self._nbytes = int(np.median(sizes))
        if fit.seconds_per_byte > 0.0:
            return fit.latency_s + fit.seconds_per_byte * self._nbytes
        usual = np.abs(sizes - self._nbytes) <= self._settings.size_tolerance * self._nbytes
        if np.count_nonzero(usual) >= self._settings.min_messages:
            return np.asarray(fit.latency_s[usual])
        # These may be probes, which are smaller: the usual size stays.
        if self._dead or self.series.state is not State.HEALTHY:
            return None
        self._nbytes = int(np.median(sizes))
        self.series.forget()
        return fit.latency_s

    def _known_rate(self) -> float | None:
        """Return the seconds per byte, if most recent iterations found a bandwidth: once, arrivals may be spaced by
        chance."""
        rates = [rate for rate in self._seconds_per_byte if rate > 0.0]
        return float(np.median(rates)) if 2 * len(rates) > len(self._seconds_per_byte) else None

    def _die(self, iteration: int, reason: str) -> Finding | None:
        self._alive_streak = 0
        if self._dead:
            return None
        before, self._dead = self.state, True
        # If it was slow, it has fallen already: a failure then is no further relapse.
        if before is State.HEALTHY:
            self._damper.fell(iteration)
        self._since, self._reason = iteration, reason
        return self._fallen_or_revived(iteration, before, None)

    def _revive(self, iteration: int) -> Finding | None:
        """Count an iteration in which a dead path carried messages. After enough of them, its state is that of its
        level."""
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
        return self._fallen_or_revived(iteration, State.DEAD, self.series.window.level().value)

    def _fallen_or_revived(self, iteration: int, before: State, level_s: float | None) -> Finding:
        known = len(self.series.window) > 0
        return self._finding(iteration, before, self.state, level_s, self.series.baseline.value if known else None)


def _messages(sample: LinkSample, clock_correction_s: float) -> Messages | None:
    """Return the messages that arrived, in the order in which they were sent; None if there are none."""
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


_Sort = tuple[int, str, int]
"""Stage, kind of action and chunk. These durations grow with the size in the same way in all pipelines."""
_PROPORTIONAL, _QUADRATIC = 1.0, 2.0
_ENOUGH = 0.1
"""Spread of sizes (sum of squared logarithms of relative sizes) above which the measured growth is used."""


class SizeModel:
    """Growth of durations with the size of the computation: duration ~ size ** power, 0 <= power <= 2.

    The power is the slope of log(duration) over log(size) among the actions of a stage's iteration, by least squares
    over all iterations and pipelines. The speed of a stage affects all its actions alike, so it does not change the
    slope. Until sizes have differed within iterations, the power is 1.
    """

    def __init__(self) -> None:
        self._usual: float | None = None
        """Reference size of all durations: the median of the first iteration."""
        self._products: dict[_Sort, float] = defaultdict(float)
        self._squares: dict[_Sort, float] = defaultdict(float)

    def alike(self, sample: IterationSample) -> IterationSample:
        """Return `sample` with all durations scaled to the usual size. Learns from the sample, unless it was
        disturbed."""
        known = [np.asarray(sizes) for stage in sample.stages.values() for sizes in stage.sizes.values()]
        if not known:
            return sample
        together = np.concatenate(known)
        if self._usual is None:
            self._usual = float(np.median(together))
        # The usual case, sequences of one length, costs no more than this.
        if (together == self._usual).all():
            return sample
        if sample.disturbance is None:
            for identity, stage in sample.stages.items():
                self._learn(identity, stage)
        stages = {identity: self._of_usual_size(identity, stage) for identity, stage in sample.stages.items()}
        return dataclasses.replace(sample, stages=stages)

    def power(self, sort: _Sort) -> float:
        """Return the power of the size that durations of these actions grow with."""
        if self._squares[sort] < _ENOUGH:
            return _PROPORTIONAL
        return min(max(self._products[sort] / self._squares[sort], 0.0), _QUADRATIC)

    def _learn(self, identity: StageId, stage: StageSample) -> None:
        for (kind, chunk), given in stage.sizes.items():
            sizes, durations_s = np.asarray(given), np.asarray(stage.durations_s.get((kind, chunk), ()))
            if len(sizes) < 2 or len(sizes) != len(durations_s) or min(sizes.min(), durations_s.min()) <= 0:
                continue
            larger, longer = np.log(sizes), np.log(durations_s)
            # Centred, so that the speed of the stage drops out: it adds a constant to all of `longer`, and a constant
            # times sizes that add up to 0 is 0.
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


# A series that was slow from the start has no healthy past of its own: it is compared with its peers.

# Of two series either may be the slow one, so it takes two peers at least. Positions of one pipeline differ more.
_MIN_REPLICAS = 2
_MIN_OTHERS = 3


class DetectorPlace(NamedTuple):
    """Place of a series in the job."""

    pipeline: int
    position: Any
    """Equal for the same stage (or link) of different pipelines."""
    sort: Any
    """Path, or kind of action and chunk. Series of different sorts are never compared."""
    work: Any = None
    """Layers of the chunk, as text. Different positions are compared only if this is equal."""


def declare_slower_than_peers(
    settled: Mapping[DetectorPlace, Series],
    compared: set[DetectorPlace],
    changes: ChangeSettings,
    iteration: int,
    action_s: float,
) -> dict[DetectorPlace, Change]:
    """Declare each series slow whose level is far above the median of its peers. Return the changes.

    Each is compared once, and is among `compared` then: later it is judged by its own past. A level that exceeds its
    peers' by less than its own noise, as one of few probes on a busy host, is compared again after the next iteration.

    Peers are the same position in other pipelines. If there are too few, peers are other positions of its own pipeline
    with the same work: in an uneven pipeline, a stage with more layers is not slow.
    """
    new = [place for place in settled if place not in compared]
    compared.update(new)
    levels_s = {place: series.window.value for place, series in settled.items()} if new else {}
    declared: dict[DetectorPlace, Change] = {}
    for place in new:
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
        least_s = changes.material_s(usual_s, action_s)
        if series.state is State.SLOW or levels_s[place] <= factor * usual_s or excess_s < least_s:
            continue
        if excess_s < changes.sigmas * series.window.level().error:
            compared.remove(place)
        else:
            evidence = f"comparison with {who}, at {seconds(usual_s)}"
            declared[place] = series.declare_slow(max(0.0, usual_s), iteration, evidence)
    return declared


# If clocks drift apart, a link seems slow in one direction, and faster than light in the other.

HostPair = tuple[int, int, int]
"""Pipeline, source stage, target stage."""


def clock_corrections(links: Mapping[LinkId, LinkSample], min_messages: int) -> dict[HostPair, float]:
    """Return the seconds to subtract from the transfer times of each pair of stages, on any path.

    Only the impossible is corrected: if the median time of one direction is negative, both are shifted until it is 0.
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
    for (pipeline, source, target), lacking_s in impossible_s.items():
        if lacking_s > 0.0:
            # What one direction has too little, the other has too much: their sum, a round trip, needs no common clock.
            for pair, shift_s in (((pipeline, target, source), lacking_s), ((pipeline, source, target), -lacking_s)):
                corrections[pair] = corrections.get(pair, 0.0) + shift_s
    return corrections


class Detector:
    """Judges all links and stages of a job. Deterministic: the same samples give the same findings. Not thread-safe."""

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self._settings = settings if settings is not None else DetectorSettings()
        self._sizes = SizeModel()
        self._links: dict[LinkId, LinkTracker] = {}
        self._stages: dict[StageId, StageTracker] = {}
        self._observed = 0
        self._iteration: int | None = None
        self._action_s = 0.0
        """Approximate median seconds of an action, over all stages, in the latest undisturbed iteration."""
        self._compared: set[DetectorPlace] = set()
        """Places whose first level has been compared with their peers' for good."""

    def observe(self, sample: IterationSample) -> list[Finding]:
        """Take in one iteration; return its findings, stages first, then links, each in order of their names.

        Durations are scaled to the usual size where sizes are known. Raises ValueError unless iterations come in
        ascending order; gaps are allowed.
        """
        if self._iteration is not None and sample.iteration <= self._iteration:
            raise ValueError(f"iteration {sample.iteration} was observed after iteration {self._iteration}")
        self._iteration = sample.iteration
        self._observed += 1
        # First, as all that follows compares durations with each other.
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
        """Return the present estimates of all links and stages that were ever measured."""
        links = {identity: tracker.estimate() for identity, tracker in sorted(self._links.items())}
        stages = {identity: tracker.estimate() for identity, tracker in sorted(self._stages.items())}
        return Estimates(
            {identity: estimate for identity, estimate in links.items() if estimate is not None},
            {identity: estimate for identity, estimate in stages.items() if estimate is not None},
        )

    def _note_action_time(self, sample: IterationSample) -> None:
        # By partition, which is not exact for even counts but cheaper: it runs for all stages in every iteration.
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
        """Return the iteration from which on another path, or the other direction, of this link is not healthy; None if
        all are healthy."""
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
        for place, change in self._compare(settled, self._settings.stage, iteration).items():
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
        for place, change in sorted(self._compare(settled, self._settings.link, iteration).items()):
            source, target = place.position
            findings.append(self._links[LinkId(place.pipeline, source, target, place.sort)].report(iteration, change))
        return findings

    def _compare(
        self, settled: Mapping[DetectorPlace, Series], changes: ChangeSettings, iteration: int
    ) -> Mapping[DetectorPlace, Change]:
        return declare_slower_than_peers(settled, self._compared, changes, iteration, self._action_s)
