# SPDX-License-Identifier: Apache-2.0
"""The one rank that turns everybody's measurements into plans."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from adaptra_megatron.runtime.exchange import Decision
from adaptra_megatron.runtime.measurements import StageMeasurement, estimate_costs, mean_idle_share
from adaptra_megatron.runtime.plans import (
    RELEASED_AT_BACKWARD_INPUT,
    PlanBook,
    Replanner,
    changed_materially,
    describe,
)
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.telemetry.scalars import JobFigures, LinkFigures

logger = logging.getLogger("adaptra_megatron.runtime")


class PlanLeader:
    """Estimates costs after each iteration and decides on the schedule. Lives in the exchange's thread alone.

    Where the schedule is not its to choose (policy observe), it says what it sees and keeps what runs.
    """

    def __init__(self, book: PlanBook, telemetry: RunTelemetry) -> None:
        """`book`: of the leading rank; read for layout, caps and what runs before the first plan."""
        self._book = book
        self._telemetry = telemetry
        self._replanner = Replanner(book.layout)
        self.costs: Costs | None = None
        """The latest estimate."""
        self._decided: dict[int, Schedule] = {}
        self._number = 0
        self._measured = 0

    def decide(self, measurements: Sequence[StageMeasurement]) -> Decision:
        """What to run next, given one iteration's measurements of all ranks."""
        decision = self._decide(measurements)
        return decision._replace(requests=self._telemetry.requests(), job=self._figures(measurements))

    def _figures(self, measurements: Sequence[StageMeasurement]) -> JobFigures | None:
        if self.costs is None:
            return None
        links = {link: LinkFigures(latency_s=cost.latency_s) for link, cost in self.costs.links.items()}
        return JobFigures(bubble_fraction=mean_idle_share(measurements), links=links)

    def _decide(self, measurements: Sequence[StageMeasurement]) -> Decision:
        self._measured += 1
        keep = Decision(self._number, None)
        # The first iteration pays for allocations and lazy set-up everywhere: it would mislead the planner.
        if self._measured == 1:
            return keep
        book, micro_batches = self._book, measurements[0].micro_batches
        before = self.costs
        costs = estimate_costs(
            measurements,
            stages=book.layout.stages,
            chunks=book.layout.chunks,
            micro_batches=micro_batches,
            can_split=book.adapts and book.layout.can_split,
            caps=book.caps(micro_batches),
            released_at_backward_input=RELEASED_AT_BACKWARD_INPUT,
            previous=before,
        )
        if costs is None:
            return keep
        self.costs = costs
        if not book.adapts:
            if before is None or changed_materially(before, costs):
                logger.info("adaptra: observed %s", describe(costs))
            return keep
        current = self._decided.get(micro_batches) or book.calibration_schedule(micro_batches)
        chosen, made = self._replanner.decide(costs, current)
        if made is not None:
            self._telemetry.log(dataclasses.replace(made, number=self._number + made.adopted))
        if chosen is None:
            return keep
        self._decided[micro_batches] = chosen
        self._number += 1
        return Decision(self._number, schedule_to_csv(chosen))
