# SPDX-License-Identifier: Apache-2.0
"""The leading rank's decisions on routes while cells are dead: all micro-batches pass live ones, as costs change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from adaptra_megatron.control.deciders import Context, Telemetry
from adaptra_megatron.control.decisions import Routing
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.order.replanner import material_change
from adaptra_megatron.control.routes.cell_order import cell_orders, moved_by, schedule_of
from adaptra_megatron.control.routes.cell_speeds import cell_figures, cell_speeds, cell_tables, seconds_of, stragglers
from adaptra_megatron.control.routes.route_decider import LEAST_GAIN, RoutePolicy, announce
from adaptra_megatron.detector.samples import IterationSample, LinkId
from adaptra_megatron.reasons import Reason, joined
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.planner import RoutedPlan, plan_routed
from adaptra_megatron.schedule.routing.plans import RoutedSchedule
from adaptra_megatron.schedule.routing.simulator import RoutedSimulation, simulate_routed
from adaptra_megatron.telemetry.figures.scalars import RouteFigures


class LiveCellDecider:
    """Plans what all live cells run, in place of what is decided on the order of a pipeline by itself.

    Costs are those of the slowest pipeline, stage by stage and link by link, as for such orders; where routes are to
    lead round slow cells as well, each cell has its own seconds. Where stages have several chunks, what was planned as
    the set of live cells began stays.
    """

    def __init__(self, policy: RoutePolicy, stages: int, telemetry: Telemetry, running: Routing | None) -> None:
        """`running`: what was decided before, or planned when the set of live cells began; None: it is not known."""
        self._policy, self._telemetry = policy, telemetry
        self._count = 0 if running is None else running.number
        self._present: RoutedSchedule | None = None
        """What runs."""
        if running is not None and running.number:
            replicas = len(policy.pipelines)
            self._present = schedule_of(running.orders, replicas, stages, running.micro_batches)
        self._planned: RoutedCosts | None = None
        """Costs of the latest planning."""
        self._speeds: Mapping[Cell, float] = {}
        """Latest ones of all live cells; empty until each stage has been measured."""
        self._gain_s: float | None = None

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Estimates tell all that counts."""

    def decide(self, context: Context) -> Routing | None:
        """New routes and orders, where they are worth a switch."""
        context.routed = True
        if context.costs is None or context.costs.chunks > 1:
            return None
        known = dataclasses.replace(context.costs, backward_s=None)
        tables = [cell_tables(known, context.estimates, lanes) for lanes in self._policy.pipelines]
        self._speeds = cell_speeds(seconds_of(tables, without=self._policy.dead))
        costs = (known,) * len(tables)
        if self._policy.avoids_slow:
            costs = tuple(known.with_tables(table) for table in tables)
        routed = RoutedCosts(replicas=costs, dead=frozenset(self._policy.dead))
        reason = self._reason(context, routed)
        if not reason:
            return None
        self._planned = routed
        return self._plan(context, routed, reason)

    def figures(self) -> RouteFigures | None:
        """Figures of the cells and of what runs; None until each stage has been measured."""
        if not self._speeds:
            return None
        moves = () if self._present is None else self._present.routing.moves()
        return RouteFigures(cells=cell_figures(self._speeds, moves), predicted_gain_s=self._gain_s)

    def _reason(self, context: Context, costs: RoutedCosts) -> Reason:
        """Why planning is due, in words; empty where it is not."""
        relevant = {*context.in_use.values(), *context.carried.values()}
        found: list[Reason] = [
            finding.describe()
            for finding in context.findings
            if not isinstance(finding.subject, LinkId) or finding.subject in relevant
        ]
        if self._planned is None:
            found.append("first costs of the live cells")
        elif not found:
            changes = map(material_change, self._planned.replicas, costs.replicas)
            found += [change for change in changes if change is not None][:1]
        return joined([*found, *context.reasons])

    def _plan(self, context: Context, costs: RoutedCosts, reason: Reason) -> Routing | None:
        runs = None
        if self._present is not None and self._present.routing.micro_batches == context.micro_batches:
            runs = simulate_routed(self._present, costs)
        split = any(any(map(any, each.backward_weight_s)) for each in costs.replicas)
        routing = None if runs is None else runs.schedule.routing
        plan = plan_routed(costs, present=routing, least_gain=LEAST_GAIN, split=split)
        if runs is not None and not _pays(plan, runs, costs):
            return None
        self._count += 1
        self._present = plan.schedule
        present_s = None if runs is None else runs.period_s
        self._gain_s = None if present_s is None else present_s - plan.simulation.period_s
        slow = stragglers(self._speeds) if self._policy.avoids_slow else {}
        announce(self._telemetry, context, plan, present_s, reason, slow, self._speeds)
        orders = cell_orders(plan.simulation, costs.replicas[0])
        return Routing(self._count, context.micro_batches, moved_by(plan.routing), orders)


def _pays(plan: RoutedPlan, runs: RoutedSimulation, costs: RoutedCosts) -> bool:
    """Return whether `plan` saves enough, or what runs would hold more activations than there is memory for."""
    if plan.simulation.period_s <= (1.0 - LEAST_GAIN) * runs.period_s:
        return True
    stages, peaks = costs.stages, runs.peak_in_flight
    replicas = range(len(costs.replicas))
    return any(costs.replicas[each].stages_over_cap(peaks[each * stages : (each + 1) * stages]) for each in replicas)
