# SPDX-License-Identifier: Apache-2.0
"""The leading rank's decisions on the routes of micro-batches between replicas."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.control.deciders import Context, Telemetry
from adaptra_megatron.control.decisions import Forecast, Moved, Routing
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.routes.cell_order import cell_orders, moved_by, schedule_of
from adaptra_megatron.control.routes.cell_speeds import (
    Tables,
    cell_figures,
    cell_speeds,
    cell_tables,
    seconds_of,
    slowness,
    stragglers,
)
from adaptra_megatron.detector.samples import IterationSample
from adaptra_megatron.log import logger_of
from adaptra_megatron.reasons import Reason, reason_fields, reason_text
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.routing import plans
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts, RoutingError
from adaptra_megatron.schedule.routing.planner import RoutedPlan, plan_routed
from adaptra_megatron.telemetry.events.events import RoutesChosen
from adaptra_megatron.telemetry.figures.scalars import RouteFigures

logger = logger_of(__name__)

CHANGED = 1.08
"""Routes are planned anew for a cell that takes so many times as long as they were planned for, or as much less."""
LEAST_GAIN = 0.05
"""Share of an iteration that other routes have to save."""


@dataclass(frozen=True, kw_only=True)
class RoutePolicy:
    """Who the replicas are."""

    pipelines: tuple[tuple[int, ...], ...]
    """First ranks of the pipelines of each replica: one for each lane."""
    pinned: tuple[int, ...] = ()
    """Stages whose micro-batches cannot be routed."""
    dead: tuple[Cell, ...] = ()
    """Cells that take no work, round which all routes lead."""
    avoids_slow: bool = True
    """True: routes lead round slow cells, too."""


class RouteDecider:
    """Follows the speed of every cell. Comes before the order is decided on, which counts where nothing is routed."""

    def __init__(self, policy: RoutePolicy, stages: int, telemetry: Telemetry, running: Routing | None = None) -> None:
        """`running`: what was decided before; None: nothing."""
        self._policy, self._telemetry = policy, telemetry
        self._count = 0 if running is None else running.number
        self._present: plans.Routing | None = None
        """What runs; None: nothing is routed."""
        if running is not None and running.number:
            replicas, orders = len(policy.pipelines), running.orders
            self._present = schedule_of(orders, replicas, stages, running.micro_batches).routing
        self._speeds: Mapping[Cell, float] = {}
        """Latest ones of all cells; empty until all have been measured."""
        self._gain_s: float | None = None
        self._planned_for: Mapping[Cell, float] = {}
        """Seconds of a micro-batch at each cell, as the latest routes were planned for."""
        self._refused = False
        self._slowness = () if running is None else running.slowness
        """Slowness of the replicas, as published last."""

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Estimates tell all that counts."""

    def decide(self, context: Context) -> Routing | None:
        """New routes, where they are worth a switch; where there are none, how slow the replicas are."""
        context.routed = self._present is not None
        if context.costs is None:
            return None
        tables = [cell_tables(context.costs, context.estimates, lanes) for lanes in self._policy.pipelines]
        seconds = seconds_of(tables)
        self._speeds = cell_speeds(seconds)
        routing = self._routes(context, context.costs, tables, seconds)
        if routing is not None:
            self._slowness = ()
            return routing
        found, told = slowness(seconds), self._slowness or (1.0,) * len(tables)
        if self._present is not None or not any(_differ(*each) for each in zip(found, told, strict=True)):
            return None
        self._slowness = found
        return Routing(0, context.micro_batches, slowness=found)

    def _routes(
        self, context: Context, known: Costs, tables: Sequence[Tables], seconds: Mapping[Cell, float]
    ) -> Routing | None:
        if self._refused:
            return None
        slow = stragglers(self._speeds, self._policy.pinned)
        same_size = self._present is None or self._present.micro_batches == context.micro_batches
        if (not slow and self._present is None) or (same_size and not self._changed(seconds)):
            return None
        self._planned_for = seconds
        if not slow:
            return self._go_home(context)
        costs = dataclasses.replace(known, backward_s=None)
        try:
            replicas = tuple(costs.with_tables(table) for table in tables)
            routed = RoutedCosts(replicas=replicas, pinned=frozenset(self._policy.pinned))
        except RoutingError as why:
            self._refused = True
            logger.warning("micro-batches cannot be routed around slow cells: %s", why)
            return None
        present = self._present if same_size else None
        plan = plan_routed(routed, present=present, least_gain=LEAST_GAIN, split=any(map(any, costs.backward_weight_s)))
        return self._adopt(context, plan, slow, costs)

    def figures(self) -> RouteFigures | None:
        """Figures of the cells and of what runs; None until all cells have been measured."""
        if not self._speeds:
            return None
        moves = () if self._present is None else self._present.moves()
        return RouteFigures(cells=cell_figures(self._speeds, moves), predicted_gain_s=self._gain_s)

    def _changed(self, seconds: Mapping[Cell, float]) -> bool:
        before = self._planned_for
        return not before or any(_differ(seconds[cell], before[cell]) for cell in seconds)

    def _adopt(self, context: Context, plan: RoutedPlan, slow: Mapping[Cell, float], costs: Costs) -> Routing | None:
        if plan.kept:
            return None
        moved = moved_by(plan.routing)
        if not moved:
            return self._go_home(context)
        self._count += 1
        self._present, context.routed = plan.routing, True
        self._gain_s = None if plan.present_s is None else plan.present_s - plan.simulation.period_s
        reason = in_words(slow, moved, plan.routing.micro_batches)
        announce(self._telemetry, context, plan, plan.present_s, reason, slow, self._speeds)
        return Routing(self._count, plan.routing.micro_batches, moved, cell_orders(plan.simulation, costs))

    def _go_home(self, context: Context) -> Routing | None:
        if self._present is None:
            return None
        micro_batches, self._present, context.routed = self._present.micro_batches, None, False
        self._gain_s = None
        reason = "no cell straggles any more: every micro-batch stays in its replica"
        context.change([reason])
        logger.debug("%s", reason)
        self._telemetry.log(RoutesChosen(number=context.number + 1, reason=reason))
        return Routing(0, micro_batches)


def announce(
    telemetry: Telemetry,
    context: Context,
    plan: RoutedPlan,
    present_s: float | None,
    reason: Reason,
    slow: Mapping[Cell, float],
    speeds: Mapping[Cell, float],
) -> None:
    """Say that the next plan has the routes of `plan`. `present_s`: seconds of an iteration by those that run, at the
    same costs."""
    planned_s, bound_s = plan.simulation.period_s, plan.lower_bound.seconds
    context.change([reason])
    context.forecast = Forecast(planned_s, present_s)
    instead = "" if present_s is None else f" instead of {1e3 * present_s:.1f} ms"
    logger.debug(
        "%s: %.1f ms an iteration%s, lower bound %.1f ms", reason_text(reason), 1e3 * planned_s, instead, 1e3 * bound_s
    )
    telemetry.log(
        RoutesChosen(
            number=context.number + 1,
            **reason_fields(reason),
            predicted_s=planned_s,
            current_predicted_s=present_s,
            lower_bound_s=bound_s,
            slow={str(cell): factor for cell, factor in slow.items()},
            speeds={str(cell): round(speed, 4) for cell, speed in speeds.items()},
            micro_batches=plan.routing.micro_batches,
            moved=moved_by(plan.routing),
        )
    )


def _differ(seconds: float, before_s: float) -> bool:
    return not 1 / CHANGED < seconds / before_s < CHANGED


def in_words(slow: Mapping[Cell, float], moved: Iterable[Moved], micro_batches: int) -> str:
    """Which cells straggle, and where their micro-batches go."""
    given: Counter[tuple[int, int]] = Counter()
    takers: dict[tuple[int, int], list[int]] = {}
    for move in moved:
        given[move.source, move.stage] += move.micro_batches
        takers.setdefault((move.source, move.stage), []).append(move.target)
    parts = []
    for (replica, stage), count in sorted(given.items()):
        factor = slow.get(Cell(replica, stage))
        takes = "" if factor is None else f" takes {factor:.2g} times as long as its fastest peer and"
        names = ", ".join(map(str, sorted(takers[replica, stage])))
        parts.append(
            f"stage {stage} of replica {replica}{takes} gives {count} of its {micro_batches} micro-batches to "
            f"replica{'s' if ',' in names else ''} {names}"
        )
    return "; ".join(parts)
