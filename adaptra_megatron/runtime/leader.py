# SPDX-License-Identifier: Apache-2.0
"""The one rank that turns everybody's measurements into plans: an order of actions, and a path for every link."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from adaptra_megatron.detector.detector import Detector
from adaptra_megatron.detector.findings import Estimates, Finding, State
from adaptra_megatron.detector.samples import LinkId
from adaptra_megatron.runtime.cost_estimates import InUse, estimate_costs, link_figures, paths_in_use
from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.runtime.joining import iteration_sample
from adaptra_megatron.runtime.measurements import StageMeasurement, iteration_s, mean_idle_share
from adaptra_megatron.runtime.memory_caps import MeasuredCaps
from adaptra_megatron.runtime.path_choice import Choice
from adaptra_megatron.runtime.path_leader import PathLeader, PathPolicy, reasons
from adaptra_megatron.runtime.plans import Caps, PlanBook
from adaptra_megatron.runtime.replanner import Replanner, describe
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import Costs, costs_to_json
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.events import LinkDetection, PathChosen, StageDetection
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.telemetry.scalars import JobFigures

logger = logging.getLogger("adaptra_megatron.runtime")


class PlanLeader:
    """Has each iteration judged by the detector and decides on the plan. Lives in the exchange's thread alone.

    Where the plan is not its to choose (policy observe), it says what is found and keeps what runs.
    """

    def __init__(self, book: PlanBook, telemetry: RunTelemetry, paths: PathPolicy | None = None) -> None:
        """`book`: of the leading rank; read for layout, caps and what runs before the first plan. `paths`: None where
        links have one path only."""
        self._book = book
        self._telemetry = telemetry
        self._detector = Detector()
        self._in_use: InUse = {}
        self._paths = None if paths is None or not book.adapts else PathLeader(paths)
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

    def decide(self, rounds: Sequence[Sequence[StageMeasurement]]) -> Decision:
        """What to run next, given what all ranks measured in the latest iterations, at least one."""
        findings: list[Finding] = []
        for measurements in rounds:
            findings += self._observe(measurements)
        estimates = self._detector.estimates()
        for finding in findings:
            level = logging.INFO if finding.state is State.HEALTHY else logging.WARNING
            logger.log(level, "adaptra: %s", finding)
            self._telemetry.log(_event(finding, estimates))
        latest = rounds[-1]
        micro_batches = latest[0].micro_batches
        decision = self._plan(micro_batches, estimates, findings)
        if self._paths is not None:
            probed = self._paths.probed(estimates, micro_batches, iteration_s(latest))
            decision = decision._replace(diverted=self._paths.diverted, probed=probed)
        job = JobFigures(
            bubble_fraction=mean_idle_share(latest),
            links=link_figures(estimates, self._in_use),
            memory=self._memory.figures(self._caps),
        )
        return decision._replace(requests=self._telemetry.requests(), job=job)

    def _observe(self, measurements: Sequence[StageMeasurement]) -> list[Finding]:
        """Take one iteration in."""
        sample = iteration_sample(measurements, rendezvous=self._book.layout.rendezvous)
        self._in_use = paths_in_use(self._in_use, sample)
        if self._paths is not None:
            self._paths.learn(sample)
        self._memory.observe((measurement.stage, measurement.memory) for measurement in measurements)
        return self._detector.observe(sample)

    def _plan(self, micro_batches: int, estimates: Estimates, findings: Sequence[Finding]) -> Decision:
        book, before, keep = self._book, self.costs, Decision(self._number, None)
        caps = self._caps_for(micro_batches)
        in_use = self._in_use if self._paths is None else self._paths.in_use(self._in_use, estimates)
        costs = self._estimate(estimates, in_use, micro_batches, caps)
        if costs is None:
            return keep
        if not book.adapts:
            self.costs = costs
            if before is None:
                logger.info("adaptra: observed %s", describe(costs))
            return keep
        if micro_batches not in self._running:
            self._running[micro_batches] = book.calibration_schedule(micro_batches)
        current = self._running[micro_batches]
        choices = [] if self._paths is None else self._paths.choices(estimates, costs)
        before_s = None
        if choices and self._paths is not None:
            before_s = simulate(current, costs).makespan_s if current.micro_batches == micro_batches else None
            self._paths.take(choices, estimates)
            self._number += 1
            in_use = self._paths.in_use(self._in_use, estimates)
            costs = self._estimate(estimates, in_use, micro_batches, caps) or costs
        self.costs = costs
        relevant = {*in_use.values(), *self._in_use.values()}
        why = [str(found) for found in findings if not isinstance(found.subject, LinkId) or found.subject in relevant]
        chosen, made = self._replanner.decide(costs, current, [*why, *reasons(choices)])
        if chosen is None and not choices:
            if made is not None:
                self._telemetry.log(dataclasses.replace(made, number=self._number))
            return keep
        assert made is not None, "whatever changes is planned for"
        self._number += not choices
        self._telemetry.log(dataclasses.replace(made, number=self._number if chosen is not None else keep.number))
        self._tell(choices)
        decision = Decision(
            self._number,
            None,
            predicted_s=made.predicted_s,
            before_predicted_s=made.current_predicted_s if before_s is None else before_s,
        )
        if chosen is None:
            return decision
        self._running[micro_batches] = chosen
        return decision._replace(
            csv=schedule_to_csv(chosen),
            costs=json.dumps(costs_to_json(costs)),
            caps=costs.max_in_flight,
            released_at_backward_input=costs.released_at_backward_input,
        )

    def _tell(self, choices: Sequence[Choice]) -> None:
        """Links are to take other paths from the present plan on."""
        for choice, text in zip(choices, reasons(choices), strict=True):
            logger.info("adaptra: %s", text)
            self._telemetry.log(
                PathChosen(
                    number=self._number,
                    pipeline=choice.link.pipeline,
                    source=choice.link.source,
                    target=choice.link.target,
                    before=choice.before.value,
                    after=choice.path.value,
                    reason=choice.reason,
                    message_s={path.value: cost_s for path, cost_s in choice.message_s.items()},
                    gain_s=choice.gain_s,
                )
            )

    def _caps_for(self, micro_batches: int) -> Caps:
        self._caps = self._book.caps(micro_batches, self._memory.rooms)
        if (short := self._memory.short_of(self._caps)) is not None and not self._said_short:
            self._said_short = True
            logger.warning("adaptra: %s; a lower --adaptra-max-in-flight is safer, or none at all", short)
        return self._caps

    def _estimate(self, estimates: Estimates, in_use: InUse, micro_batches: int, caps: Caps) -> Costs | None:
        layout = self._book.layout
        return estimate_costs(
            estimates,
            in_use,
            layout,
            micro_batches=micro_batches,
            can_split=self._book.adapts and layout.can_split,
            caps=caps,
            released_at_backward_input=self._memory.released_at_backward_input(layout.stages),
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
