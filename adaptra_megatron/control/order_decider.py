# SPDX-License-Identifier: Apache-2.0
"""The leading rank's decisions on the order of actions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from adaptra_megatron.control.deciders import Context, Telemetry
from adaptra_megatron.control.decisions import Forecast, Order
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.order.plans import PlanState
from adaptra_megatron.control.order.replanner import Replanner
from adaptra_megatron.detector.samples import IterationSample, LinkId
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs_json import costs_to_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv


class OrderDecider:
    """Plans for the costs that the deciders before it have left; comes after all that change them."""

    def __init__(self, book: PlanState, telemetry: Telemetry, running: Order | None = None) -> None:
        """`book`: read for what runs before the first plan. `running`: what was decided before; None: nothing."""
        self._book, self._telemetry = book, telemetry
        self._replanner = Replanner(book.layout)
        self._running: dict[int, Schedule] = {}
        """By number of micro-batches."""
        if running is not None:
            schedule = schedule_from_csv(running.csv, chunks=book.layout.chunks)
            self._running[schedule.micro_batches] = schedule

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Costs tell all that counts."""

    def decide(self, context: Context) -> Order | None:
        """A new order, where it is worth a switch; the forecast, too, where any other decider changes the plan."""
        costs, micro_batches = context.costs, context.micro_batches
        if costs is None or context.routed:
            return None
        if micro_batches not in self._running:
            self._running[micro_batches] = self._book.calibration_schedule(micro_batches)
        current = self._running[micro_batches]
        relevant = {*context.in_use.values(), *context.carried.values()}
        why = [
            found.describe()
            for found in context.findings
            if not isinstance(found.subject, LinkId) or found.subject in relevant
        ]
        chosen, made = self._replanner.decide(costs, current, why, context.reasons)
        if made is None:
            if (wanted := self._replanner.worth_of_memory()) is not None:
                self._telemetry.log(wanted)
            return None
        self._telemetry.log(dataclasses.replace(made, number=context.number + (chosen is not None)))
        if chosen is None and not context.reasons:
            return None
        before_s = made.current_predicted_s
        if context.before is not None and current.micro_batches == micro_batches:
            before_s = self._book.layout.iteration_s(current, context.before)
        context.forecast = Forecast(made.predicted_s, before_s)
        if chosen is None:
            return None
        context.change([made.reason])
        self._running[micro_batches] = chosen
        costs_json = json.dumps(costs_to_json(costs))
        return Order(schedule_to_csv(chosen), costs_json, costs.max_in_flight, costs.released_at_backward_input)
