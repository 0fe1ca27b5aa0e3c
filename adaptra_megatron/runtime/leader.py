# SPDX-License-Identifier: Apache-2.0
"""The one rank that turns everybody's measurements into plans."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from adaptra_megatron.detector.detector import Detector
from adaptra_megatron.detector.findings import Estimates, Finding, State
from adaptra_megatron.detector.samples import LinkId
from adaptra_megatron.runtime.cost_estimates import InUse, estimate_costs, link_figures, paths_in_use
from adaptra_megatron.runtime.exchange import Decision
from adaptra_megatron.runtime.measurements import StageMeasurement, iteration_sample, mean_idle_share
from adaptra_megatron.runtime.memory_caps import MeasuredCaps
from adaptra_megatron.runtime.plans import PlanBook, Replanner, describe
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.events import LinkDetection, StageDetection
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.telemetry.scalars import JobFigures

logger = logging.getLogger("adaptra_megatron.runtime")


class PlanLeader:
    """Has each iteration judged by the detector and decides on the schedule. Lives in the exchange's thread alone.

    Where the schedule is not its to choose (policy observe), it says what is found and keeps what runs.
    """

    def __init__(self, book: PlanBook, telemetry: RunTelemetry) -> None:
        """`book`: of the leading rank; read for layout, caps and what runs before the first plan."""
        self._book = book
        self._telemetry = telemetry
        self._detector = Detector()
        self._in_use: InUse = {}
        self._replanner = Replanner(book.layout)
        self._memory = MeasuredCaps()
        self._caps: tuple[float | None, ...] = (None,) * book.layout.stages
        """Of the latest costs."""
        self._said_short = False
        self.costs: Costs | None = None
        """The latest estimate."""
        self._running: dict[int, Schedule] = {}
        """By number of micro-batches."""
        self._number = 0

    def decide(self, measurements: Sequence[StageMeasurement]) -> Decision:
        """What to run next, given one iteration's measurements of all ranks."""
        sample = iteration_sample(measurements)
        findings = self._detector.observe(sample)
        self._in_use = paths_in_use(self._in_use, sample)
        self._memory.observe((measurement.stage, measurement.memory) for measurement in measurements)
        estimates = self._detector.estimates()
        for finding in findings:
            level = logging.INFO if finding.state is State.HEALTHY else logging.WARNING
            logger.log(level, "adaptra: %s", finding)
            self._telemetry.log(_event(finding, estimates))
        decision = self._plan(measurements[0].micro_batches, estimates, findings)
        job = JobFigures(
            bubble_fraction=mean_idle_share(measurements),
            links=link_figures(estimates, self._in_use),
            memory=self._memory.figures(self._caps),
        )
        return decision._replace(requests=self._telemetry.requests(), job=job)

    def _plan(self, micro_batches: int, estimates: Estimates, findings: Sequence[Finding]) -> Decision:
        book, before, keep = self._book, self.costs, Decision(self._number, None)
        caps = book.caps(micro_batches, self._memory.rooms)
        costs = estimate_costs(
            estimates,
            self._in_use,
            stages=book.layout.stages,
            chunks=book.layout.chunks,
            micro_batches=micro_batches,
            can_split=book.adapts and book.layout.can_split,
            caps=caps,
            released_at_backward_input=self._memory.released_at_backward_input(book.layout.stages),
        )
        self._caps = caps
        if (short := self._memory.short_of(caps)) is not None and not self._said_short:
            self._said_short = True
            logger.warning("adaptra: %s; a lower --adaptra-max-in-flight is safer, or none at all", short)
        if costs is None:
            return keep
        self.costs = costs
        if not book.adapts:
            if before is None:
                logger.info("adaptra: observed %s", describe(costs))
            return keep
        if micro_batches not in self._running:
            self._running[micro_batches] = book.calibration_schedule(micro_batches)
        current = self._running[micro_batches]
        chosen, made = self._replanner.decide(costs, current, [str(finding) for finding in findings])
        if made is not None:
            self._telemetry.log(dataclasses.replace(made, number=self._number + made.adopted))
        if chosen is None or made is None:
            return keep
        self._running[micro_batches] = chosen
        self._number += 1
        return Decision(
            self._number,
            schedule_to_csv(chosen),
            predicted_s=made.predicted_s,
            before_predicted_s=made.current_predicted_s,
            caps=costs.max_in_flight,
            released_at_backward_input=costs.released_at_backward_input,
        )


def _event(finding: Finding, estimates: Estimates) -> LinkDetection | StageDetection:
    subject = finding.subject
    change: dict[str, Any] = {"before": finding.before.value, "after": finding.state.value, "reason": finding.reason}
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
