# SPDX-License-Identifier: Apache-2.0
"""Turns the measurements of a replica into decisions: what is found, and what each decider makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaptra_megatron.control.deciders import Context, Decider, Telemetry
from adaptra_megatron.control.decisions import Decision, PackedFigures, Paths, TelemetrySection
from adaptra_megatron.control.joining import iteration_sample
from adaptra_megatron.control.measurements import StageMeasurement, mean_idle_share
from adaptra_megatron.control.order.cost_estimates import InUse, estimate_costs, link_figures, paths_in_use
from adaptra_megatron.control.order.memory_caps import MeasuredCaps
from adaptra_megatron.control.order.plans import Caps, PlanState
from adaptra_megatron.control.order.replanner import describe
from adaptra_megatron.control.order_decider import OrderDecider
from adaptra_megatron.control.path_decider import PathDecider, PathPolicy
from adaptra_megatron.control.routes.live_cells import LiveCellDecider
from adaptra_megatron.control.routes.route_decider import RouteDecider, RoutePolicy
from adaptra_megatron.detector.detector import Detector
from adaptra_megatron.detector.findings import Estimates, Finding
from adaptra_megatron.detector.samples import LinkId
from adaptra_megatron.log import logger_of
from adaptra_megatron.reasons import reason_fields
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.telemetry.events.events import LinkDetection, PolicyChanged, StageDetection
from adaptra_megatron.telemetry.figures.scalars import JobFigures

logger = logger_of(__name__)


class DecisionEngine:
    """Has each iteration judged by the detector, and the deciders decide. For one thread.

    Where nothing is its to choose (policy observe), it says what is found and keeps what runs.
    """

    def __init__(
        self,
        book: PlanState,
        telemetry: Telemetry,
        paths: PathPolicy | None = None,
        running: Decision | None = None,
        routes: RoutePolicy | None = None,
    ) -> None:
        """`book`: read for layout, caps and what runs before the first plan. `paths`: None where links have one path
        only. `running`: what another leader has decided before; None: nothing. `routes`: None where micro-batches stay
        in their replicas."""
        running = Decision(0) if running is None else running
        self._paths, self._route_policy = paths, routes
        self._book = book
        self._telemetry = telemetry
        self._detector = Detector()
        self._in_use: InUse = {}
        self._deciders: dict[str, Decider] = {}
        """By the section of the decision, in the order in which they decide."""
        self._routes: RouteDecider | LiveCellDecider | None = None
        self._make_deciders(running)
        self._memory = MeasuredCaps()
        self._caps: Caps = (None,) * book.layout.stages
        """Caps of the latest costs."""
        self._said_short = False
        self.costs: Costs | None = None
        """The latest estimate."""
        self._number = running.number

    def _make_deciders(self, running: Decision) -> None:
        """Those that decide by the policy in force, which go on from `running`."""
        book, telemetry, paths, routes = self._book, self._telemetry, self._paths, self._route_policy
        self._deciders.clear()
        if paths is not None and not book.observes:
            self._deciders["paths"] = PathDecider(paths, telemetry, running.paths)
        if self._routes is not None:  # dead cells take no work under any policy
            self._deciders["routing"] = self._routes
        elif routes is not None and (book.adapts or routes.dead):
            kind = LiveCellDecider if routes.dead else RouteDecider
            self._routes = kind(routes, book.layout.stages, telemetry, running.routing)
            self._deciders["routing"] = self._routes
        if book.adapts:
            self._deciders["order"] = OrderDecider(book, telemetry, running.order)

    def _follow(self, policy: str) -> Paths | None:
        """Have `policy` decided by from now on; where links take their own paths again, the section that says so."""
        before, self._book.number = self._book.policy, max(self._number, self._book.number) + 1
        self._book.follow(policy)
        self._number = self._book.number
        self._telemetry.log(PolicyChanged(number=self._number, before=before, after=policy))
        self._make_deciders(Decision(0))
        return Paths() if self._paths is not None and self._book.observes else None

    def decide(self, rounds: Sequence[Sequence[StageMeasurement]], policy: str = "") -> Decision:
        """What to run next, given what all ranks measured in the latest iterations, at least one. `policy`: asked for
        by a user; empty: none is."""
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
        if paths is not None:
            sections = {**sections, "paths": paths}
        self._number = number + bool(context.reasons)
        job = JobFigures(
            bubble_fraction=mean_idle_share(latest),
            links=link_figures(estimates, self._in_use),
            memory=self._memory.figures(self._caps),
            routes=None if self._routes is None else self._routes.figures(),
        )
        told = TelemetrySection(self._telemetry.requests(), PackedFigures.of(job), policy if changes else "")
        return Decision(self._number, forecast=context.forecast, told=told, **sections)

    def _observe(self, measurements: Sequence[StageMeasurement]) -> list[Finding]:
        """Take one iteration in."""
        sample = iteration_sample(measurements, rendezvous=self._book.layout.rendezvous)
        self._in_use = paths_in_use(self._in_use, sample)
        self._memory.observe((measurement.stage, measurement.memory) for measurement in measurements)
        for decider in self._deciders.values():
            decider.observe(measurements, sample)
        return self._detector.observe(sample)

    def _caps_for(self, micro_batches: int) -> Caps:
        caps = self._book.caps(micro_batches, self._memory.rooms)
        if (short := self._memory.short_of(caps)) is not None and not self._said_short:
            self._said_short = True
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
