# SPDX-License-Identifier: Apache-2.0
"""Turn the measurements of a replica into decisions: run the detector, then each decider."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import reason_fields
from adaptra_megatron.control.deciders.decider import (
    Context,
    Decider,
    DecisionTelemetry,
    InUse,
    estimate_costs,
    link_figures,
    paths_in_use,
)
from adaptra_megatron.control.deciders.path_decider import PathDecider
from adaptra_megatron.control.deciders.plan_state import Caps, PlanState
from adaptra_megatron.control.deciders.replanner import Replanner, describe, iteration_s
from adaptra_megatron.control.deciders.route_decider import LiveCellDecider, RouteDecider
from adaptra_megatron.control.decisions import Decision, Forecast, Order, PackedFigures, Paths, TelemetrySection
from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import (
    Array,
    Estimates,
    Finding,
    IterationSample,
    LinkId,
    LinkSample,
    MessageColumns,
    StageId,
    StageSample,
)
from adaptra_megatron.control.measurements import Messages, StageMeasurement, mean_idle_share, message_order
from adaptra_megatron.control.sidecar.planner_client import PathPolicy, RoutePolicy
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.schedule.costs import Costs, costs_to_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.telemetry.events import LinkDetection, PolicyChanged, StageDetection
from adaptra_megatron.telemetry.scalars import JobFigures, MemoryFigures
from adaptra_megatron.transport.link_paths import Path

RISE_AFTER = 8
"""Consecutive iterations with room for more activations before a cap rises."""
RISE_MARGIN = 0.25
"""Room beyond a whole activation, in activations, that a rise needs: room that is just enough may be gone next time."""
RELEASED_STEP = 0.125
"""Released fractions are rounded down to multiples of this, so that noise does not cause new plans."""


@dataclass
class _StageCap:
    room: int
    """Whole activations."""
    more_for: int = 0
    """Consecutive iterations with room for more."""
    more: int = 0
    """The smallest room in these iterations, in activations."""


class MeasuredCaps:
    """Number of activations that each stage has memory for, over all its replicas. Falls at once, rises slowly."""

    def __init__(self) -> None:
        self.latest: dict[int, StageMemory] = {}
        """By stage: the memory of the replica with the least room, in the latest iteration with a report."""
        self._caps: dict[int, _StageCap] = {}
        self._released: dict[int, float] = {}
        self._guessed: set[int] = set()
        """Stages whose released fraction is estimated, not measured."""

    def observe(self, reports: Iterable[tuple[int, StageMemory | None]]) -> None:
        """Take in one iteration's reports (stage, memory) of all ranks. A rank with None reports nothing."""
        least: dict[int, StageMemory] = {}
        for stage, memory in reports:
            if memory is None:
                continue
            if stage not in least or memory.room < least[stage].room:
                least[stage] = memory
            self._take_in_released(stage, memory)
        for stage, memory in least.items():
            self._take_in(stage, memory.room)
        self.latest |= least

    @property
    def rooms(self) -> Mapping[int, int]:
        """Room by stage, in activations; stages that never reported are missing."""
        return {stage: cap.room for stage, cap in self._caps.items()}

    def released_at_backward_input(self, stages: int) -> tuple[float, ...]:
        """Return by stage the least measured fraction of an activation that an input gradient releases; 0 if unknown.
        It is negative where the input gradient takes memory."""
        released = (self._released.get(stage, 0.0) for stage in range(stages))
        return tuple(math.floor(fraction / RELEASED_STEP) * RELEASED_STEP for fraction in released)

    def figures(self, caps: Sequence[float | None]) -> dict[int, MemoryFigures]:
        """Return the figures for TensorBoard and Prometheus, by stage. `caps`: activations of each stage in plans."""
        return {
            stage: MemoryFigures(
                activation_nbytes=memory.activation_nbytes,
                free_nbytes=memory.free_nbytes,
                cap=caps[stage] or float(self._caps[stage].room),
            )
            for stage, memory in self.latest.items()
        }

    def short_of(self, caps: Sequence[float | None]) -> str | None:
        """Describe the first stage with less room than `caps` allow it; None if there is none."""
        for stage, cap in enumerate(caps):
            if stage in self._caps and cap is not None and self._caps[stage].room < cap:
                nbytes = self.latest[stage].activation_nbytes
                return (
                    f"stage {stage} may hold {cap:g} activations of {nbytes / 1e6:,.1f} MB, "
                    f"but has memory for {self._caps[stage].room}"
                )
        return None

    def _take_in_released(self, stage: int, memory: StageMemory) -> None:
        """Keep the smallest measured fraction; estimates count only until the first measurement."""
        released, known = memory.released_at_backward_input, self._released.get(stage, 1.0)
        if released is None or (memory.guessed and stage in self._released and stage not in self._guessed):
            return
        if stage in self._guessed and not memory.guessed:
            self._guessed.remove(stage)
            known = 1.0
        if memory.guessed:
            self._guessed.add(stage)
        self._released[stage] = min(released, known)

    def _take_in(self, stage: int, room: float) -> None:
        whole = max(0, math.floor(room))
        cap = self._caps.get(stage)
        if cap is None:
            self._caps[stage] = _StageCap(whole)
            return
        # A fall takes effect at once, because the next plan must fit. A rise waits: each new cap calls for a new plan.
        if whole < cap.room:
            self._caps[stage] = _StageCap(whole)
            return
        more = math.floor(room - RISE_MARGIN)
        if more <= cap.room:
            cap.more_for = 0
            return
        cap.more = more if cap.more_for == 0 else min(cap.more, more)
        cap.more_for += 1
        if cap.more_for >= RISE_AFTER:
            self._caps[stage] = _StageCap(cap.more)


BUFFERED_NBYTES = 16 << 20
"""Bytes of a message that NCCL may have sent before its receive is posted. More than twice its buffers (NCCL_BUFFSIZE,
4 MiB) of 2 CTAs."""


def iteration_sample(measurements: Sequence[StageMeasurement], *, rendezvous: bool = False) -> IterationSample:
    """Join one iteration's measurements of all ranks into a sample for the detector.

    A message that was sent on a path and did not arrive by it counts as lost there, if its receiver reported.
    `rendezvous`: whether a message of the device path leaves once its receive is posted, as over NCCL.
    """
    received: dict[LinkId, _End] = {}
    for measurement in measurements:
        for source, path, end in _ends(measurement.received, measurement.span_s[0]):
            received[LinkId(measurement.pipeline, source, measurement.stage, path.value)] = end
    # Only the receiver's report shows whether a message has arrived.
    reported = {(measurement.pipeline, measurement.stage) for measurement in measurements}
    links = {}
    for measurement in measurements:
        for target, path, end in _ends(measurement.sent, measurement.span_s[0]):
            if (measurement.pipeline, target) in reported:
                link = LinkId(measurement.pipeline, measurement.stage, target, path.value)
                links[link] = LinkSample(_joined(end, received.get(link), path, rendezvous))
    _add_probes(links, measurements)
    stages = {
        StageId(measurement.pipeline, measurement.stage): StageSample(
            measurement.durations_s, sizes=measurement.sizes, work=measurement.work
        )
        for measurement in measurements
    }
    disturbances = (measurement.disturbance for measurement in measurements)
    # One disturbed rank delays all others.
    disturbance = next((what for what in disturbances if what is not None), None)
    return IterationSample(measurements[0].iteration, links, stages, disturbance)


class _End(NamedTuple):
    """The messages of one path of one link, seen from one end, in order of their keys. Times are on the common
    clock."""

    codes: npt.NDArray[np.int64]
    """Keys as numbers."""
    nbytes: Array
    posted_s: Array
    done_s: Array


def _ends(messages: Messages, start_s: float) -> Iterator[tuple[int, Path, _End]]:
    """Yield the messages by peer and path. `start_s`: common time that theirs are relative to."""
    if not len(messages):
        return
    groups, codes = message_order(messages)
    begins = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1, [len(groups)]])
    nbytes = messages["nbytes"].astype(np.float64)
    posted_s = messages["posted_s"] + np.float64(start_s)
    done_s = messages["done_s"] + np.float64(start_s)
    for begin, until in pairwise(begins.tolist()):
        group = int(groups[begin])
        path = Path.HOST if group & 1 else Path.DEVICE
        part = slice(begin, until)
        yield group >> 1, path, _End(codes[part], nbytes[part], posted_s[part], done_s[part])


def _joined(sent: _End, received: _End | None, path: Path, rendezvous: bool) -> MessageColumns:
    """Return the sent messages, each with its arrival time (NaN if it did not arrive)."""
    nothing = np.full(len(sent.codes), np.nan)
    if received is None:
        return MessageColumns(sent.nbytes, sent.done_s, nothing, nothing)
    arrived_s, posted_s = received.done_s, received.posted_s
    # The receiver has not seen all of them, or others, too: match them by key.
    if not np.array_equal(sent.codes, received.codes):
        places = np.searchsorted(received.codes, sent.codes)
        # Beyond the end means not found; at any other index the codes differ, too.
        places[places == len(received.codes)] = 0
        here = received.codes[places] == sent.codes
        arrived_s, posted_s = (np.where(here, column[places], np.nan) for column in (arrived_s, posted_s))
    # Arrivals by the host path are seen when they happen, so the time of the receive's posting says nothing more.
    if path is Path.HOST:  # its arrivals are seen whether or not they are asked for
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, nothing)
    if not rendezvous:
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, posted_s)
    # A large message waits for its receive. A small one is buffered, and leaves before.
    leaves = sent.nbytes > BUFFERED_NBYTES
    left_s = np.where(leaves, np.fmax(sent.done_s, posted_s), sent.done_s)
    return MessageColumns(sent.nbytes, left_s, arrived_s, np.where(leaves, np.nan, posted_s))


def _add_probes(links: dict[LinkId, LinkSample], measurements: Sequence[StageMeasurement]) -> None:
    """Add the results of probes, and broken paths."""
    offset_s = {(measurement.pipeline, measurement.stage): measurement.clock_offset_s for measurement in measurements}
    for measurement in measurements:
        pipeline, stage, own_offset_s = measurement.pipeline, measurement.stage, measurement.clock_offset_s
        for probe in measurement.probes:
            if (pipeline, probe.peer) in offset_s:
                link = LinkId(pipeline, stage, probe.peer, probe.path.value)
                # Each end stamps a probe by its own clock.
                arrived_s = probe.arrived_s + offset_s[pipeline, probe.peer]
                columns = probe.nbytes, probe.sent_s + own_offset_s, arrived_s, np.nan
                before = links.get(link, LinkSample())
                message = MessageColumns(*(np.array([value], dtype=np.float64) for value in columns))
                links[link] = replace(before, messages=before.messages.and_also(message))
        for peer, path, cause in measurement.broken:
            link = LinkId(pipeline, stage, peer, path.value)
            links[link] = replace(links.get(link, LinkSample()), broken=cause)


# The leading rank's decisions on the order of actions.


class OrderDecider:
    """Decides on the order of actions. Comes last: it plans with the costs that the other deciders change."""

    def __init__(self, book: PlanState, telemetry: DecisionTelemetry, running: Order | None = None) -> None:
        """Set up. `book`: holds the order that runs before the first plan. `running`: the order decided before; None
        if none."""
        self._book, self._telemetry = book, telemetry
        self._replanner = Replanner(book.layout)
        self._running: dict[int, Schedule] = {}
        """By number of micro-batches."""
        if running is not None:
            schedule = schedule_from_csv(running.csv, chunks=book.layout.chunks)
            self._running[schedule.micro_batches] = schedule

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Do nothing: the estimates in the context are enough."""

    def decide(self, context: Context) -> Order | None:
        """Return a new order if it is worth a switch. Sets the forecast if any decider changes the plan."""
        costs, micro_batches = context.costs, context.micro_batches
        if costs is None or context.routed:
            return None
        if micro_batches not in self._running:
            self._running[micro_batches] = self._book.calibration_schedule(micro_batches)
        current = self._running[micro_batches]
        # A finding on a path that no link takes, now or next, does not change the costs.
        relevant = {*context.in_use.values(), *context.carried.values()}
        why = [
            found.describe()
            for found in context.findings
            if not isinstance(found.subject, LinkId) or found.subject in relevant
        ]
        chosen, made = self._replanner.decide(costs, current, why, context.reasons)
        if made is None:
            # Here, because it takes long: there is no new plan that would be late.
            if (wanted := self._replanner.worth_of_memory()) is not None:
                self._telemetry.log(wanted)
            return None
        self._telemetry.log(dataclasses.replace(made, number=context.number + (chosen is not None)))
        if chosen is None and not context.reasons:
            return None
        before_s = made.current_predicted_s
        # Without the other deciders' changes: the forecast shows the gain of the whole decision.
        if context.before is not None and current.micro_batches == micro_batches:
            before_s = iteration_s(self._book.layout, current, context.before)
        context.forecast = Forecast(made.predicted_s, before_s)
        if chosen is None:
            return None
        context.change([made.reason])
        self._running[micro_batches] = chosen
        costs_json = json.dumps(costs_to_json(costs))
        return Order(schedule_to_csv(chosen), costs_json, costs.max_in_flight, costs.released_at_backward_input)


logger = logger_of(__name__)


class DecisionEngine:
    """Has the detector judge each iteration, and the deciders decide. Not thread-safe.

    Under policy "observe" there are no deciders: findings are logged, and the current plan stays.
    """

    def __init__(
        self,
        book: PlanState,
        telemetry: DecisionTelemetry,
        paths: PathPolicy | None = None,
        running: Decision | None = None,
        routes: RoutePolicy | None = None,
    ) -> None:
        """Set up. `book`: holds layout, caps and the order that runs before the first plan. `paths`: None if links
        have one path only. `running`: the decision of an earlier leader; None if none. `routes`: None if micro-batches
        stay in their replicas."""
        running = Decision(0) if running is None else running
        self._paths, self._route_policy = paths, routes
        self._book = book
        self._telemetry = telemetry
        self._detector = Detector()
        self._in_use: InUse = {}
        self._deciders: dict[str, Decider] = {}
        """By section of the decision, in the order in which they decide."""
        self._routes: RouteDecider | LiveCellDecider | None = None
        self._make_deciders(running)
        self._memory = MeasuredCaps()
        self._caps: Caps = (None,) * book.layout.stages
        """Caps of the latest costs, in activations by stage."""
        self._logged_short = False
        self.costs: Costs | None = None
        """The latest costs."""
        self._number = running.number

    def _make_deciders(self, running: Decision) -> None:
        """Create the deciders of the current policy; they continue from `running`."""
        book, telemetry, paths, routes = self._book, self._telemetry, self._paths, self._route_policy
        # The state of an earlier policy's deciders does not carry over: all ranks drop their measured plans, too.
        self._deciders.clear()
        if paths is not None and not book.observes:
            self._deciders["paths"] = PathDecider(paths, telemetry, running.paths)
        # A dead cell takes no work under any policy, so this decider survives a change.
        if self._routes is not None:  # dead cells take no work under any policy
            self._deciders["routing"] = self._routes
        elif routes is not None and (book.adapts or routes.dead):
            kind = LiveCellDecider if routes.dead else RouteDecider
            self._routes = kind(routes, book.layout.stages, telemetry, running.routing)
            self._deciders["routing"] = self._routes
        if book.adapts:
            self._deciders["order"] = OrderDecider(book, telemetry, running.order)

    def _follow(self, policy: str) -> Paths | None:
        """Switch to `policy`. Returns the section that puts links back on their own paths, if they may have left
        them."""
        before, self._book.number = self._book.policy, max(self._number, self._book.number) + 1
        self._book.follow(policy)
        self._number = self._book.number
        self._telemetry.log(PolicyChanged(number=self._number, before=before, after=policy))
        self._make_deciders(Decision(0))
        return Paths() if self._paths is not None and self._book.observes else None

    def decide(self, rounds: Sequence[Sequence[StageMeasurement]], policy: str = "") -> Decision:
        """Return the next decision. `rounds`: measurements of all ranks, by iteration, at least one. `policy`: the
        policy that a user asked for; empty if none."""
        changes = policy not in ("", self._book.policy)
        paths = self._follow(policy) if changes else None
        findings = [finding for measurements in rounds for finding in self._observe(measurements)]
        estimates, latest = self._detector.estimates(), rounds[-1]
        for finding in findings:
            logger.debug("%s", finding)
            self._telemetry.log(_event(finding, estimates))
        self._caps = self._caps_for(latest[0].micro_batches)
        # A given plan has a number, too.
        number = max(self._number, self._book.number)
        context = Context(latest, estimates, findings, self._in_use, number, self._estimate)
        sections: Mapping[str, Any] = {name: decider.decide(context) for name, decider in self._deciders.items()}
        if context.costs is not None:
            if self.costs is None and not self._book.adapts:
                logger.info("observed %s", describe(context.costs))
            self.costs = context.costs
        # Under the new policy no decider of paths may be left to do this.
        if paths is not None:
            sections = {**sections, "paths": paths}
        self._number = number + bool(context.reasons)
        job = JobFigures(
            bubble_fraction=mean_idle_share(latest),
            links=link_figures(estimates, self._in_use),
            memory=self._memory.figures(self._caps),
            routes=None if self._routes is None else self._routes.figures(),
        )
        telemetry = TelemetrySection(self._telemetry.requests(), PackedFigures.of(job), policy if changes else "")
        return Decision(self._number, forecast=context.forecast, telemetry=telemetry, **sections)

    def _observe(self, measurements: Sequence[StageMeasurement]) -> list[Finding]:
        """Take in one iteration of all ranks. Returns what the detector found."""
        sample = iteration_sample(measurements, rendezvous=self._book.layout.rendezvous)
        self._in_use = paths_in_use(self._in_use, sample)
        self._memory.observe((measurement.stage, measurement.memory) for measurement in measurements)
        for decider in self._deciders.values():
            decider.observe(measurements, sample)
        return self._detector.observe(sample)

    def _caps_for(self, micro_batches: int) -> Caps:
        caps = self._book.caps(micro_batches, self._memory.rooms)
        if (short := self._memory.short_of(caps)) is not None and not self._logged_short:
            self._logged_short = True
            logger.warning("%s; lower --adaptra-max-in-flight, or omit it to use the measured limit", short)
        return caps

    def _estimate(self, context: Context) -> Costs | None:
        layout = self._book.layout
        return estimate_costs(
            context.estimates,
            context.in_use,
            layout,
            micro_batches=context.micro_batches,
            can_split=self._book.adapts,
            caps=self._caps,
            released_at_backward_input=self._memory.released_at_backward_input(layout.stages),
        )


def _event(finding: Finding, estimates: Estimates) -> LinkDetection | StageDetection:
    subject = finding.subject
    change: dict[str, Any] = {
        "before": finding.before.value,
        "after": finding.state.value,
        **reason_fields(finding.why),
    }
    change["since_iteration"] = finding.since_iteration
    if isinstance(subject, LinkId):
        estimate = estimates.links.get(subject)
        return LinkDetection(
            source=subject.source,
            target=subject.target,
            path=subject.path,
            pipeline=subject.pipeline,
            latency_s=estimate.latency_s if estimate is not None else None,
            bandwidth_bytes_s=estimate.bandwidth_bytes_per_s if estimate is not None else None,
            **change,
        )
    level_s, baseline_s = finding.level_s, finding.baseline_s
    slow_down = level_s / baseline_s if level_s is not None and baseline_s else None
    return StageDetection(stage=subject.stage, pipeline=subject.pipeline, slow_down=slow_down, **change)
