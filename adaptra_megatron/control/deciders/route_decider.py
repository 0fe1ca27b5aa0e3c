# SPDX-License-Identifier: Apache-2.0
"""Decide on routes of micro-batches between replicas, and pack the order that each cell runs."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import Reason, joined, reason_fields, reason_text
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.control.deciders.decider import Context, DecisionTelemetry, material_change
from adaptra_megatron.control.decisions import Forecast, Moved, RoutingSection
from adaptra_megatron.control.detector.observations import Estimates, IterationSample, LinkId, StageId
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar.planner_client import RoutePolicy
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, job_of
from adaptra_megatron.schedule.routing import routed_plans as plans
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts, RoutingError
from adaptra_megatron.schedule.routing.routed_planner import RoutedPlan, plan_routed
from adaptra_megatron.schedule.routing.routed_plans import Move, RoutedAction, RoutedMessage, RoutedSchedule, Routing
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation, simulate_routed
from adaptra_megatron.telemetry.events import RoutesChosen
from adaptra_megatron.telemetry.scalars import CellFigures, RouteFigures

MOST_NBYTES = 1 << 24


class CellAction(NamedTuple):
    """One action of a cell, for a micro-batch of any replica, and the peers of its messages."""

    kind: str
    """F, B, I or W."""
    chunk: int
    replica: int
    """Replica that the micro-batch belongs to."""
    micro_batch: int
    """Number within that replica."""
    source: int | None
    """Replica of the cell that sends this action's input; None if no message is needed."""
    target: int | None
    """Replica of the cell that receives this action's output; None if nothing is sent."""
    receives_before: int
    """Number of the order's receives that are posted before this action is launched."""


@dataclass(frozen=True)
class CellOrder:
    """The order of one cell for one iteration."""

    actions: tuple[CellAction, ...]
    receives: tuple[int, ...]
    """Indices of the actions that need a message, in the order in which the receives are posted."""
    cap: float | None
    """Activations that the cell may hold."""
    released_at_backward_input: float
    """Fraction of an activation that the cap counts as freed by an input gradient."""

    def packed(self) -> str:
        """Encode the order for a decision."""
        return packed(self).decode()

    @classmethod
    def unpacked(cls, text: str) -> CellOrder:
        """Decode a packed order. Raises ValueError if it is malformed."""
        order: CellOrder = unpacked(text.encode(), cls, MOST_NBYTES)
        return order


def cell_costs(costs: Costs) -> Costs:
    """Return `costs` for routes around dead cells: a whole backward is the sum of its parts, and one hardware queue
    counts as several. Plans do not model it then, but orders are safe on any number of queues (`cell_order`).
    """
    return dataclasses.replace(costs, backward_s=None, shared_queue=False, serial_queue=False)


def cell_orders(simulation: RoutedSimulation, costs: Costs) -> dict[str, str]:
    """Return the packed order of each cell ("replica.stage"). `costs`: of one pipeline, for its caps."""
    schedule = simulation.schedule
    cells = [Cell(*divmod(number, schedule.stages)) for number in range(len(schedule.orders))]
    # A single order of the actions of all cells, by simulated start, so that sender and receiver agree.
    begun = sorted(
        (begin_s, place, number)
        for number, starts_s in enumerate(simulation.start_s)
        for place, begin_s in enumerate(starts_s)
    )
    ranks = {(number, place): rank for rank, (_begin_s, place, number) in enumerate(begun)}
    made: dict[RoutedMessage, int] = {}
    for number, order in enumerate(schedule.orders):
        for place, action in enumerate(order):
            if (message := schedule.produced(cells[number].stage, action)) is not None:
                made[message] = ranks[number, place]
    found = {}
    for number, (cell, order) in enumerate(zip(cells, schedule.orders, strict=True)):
        own = [ranks[number, place] for place in range(len(order))]
        cap, released = costs.max_in_flight[cell.stage], costs.released_at_backward_input[cell.stage]
        found[str(cell)] = cell_order(schedule, cell.stage, order, own, made.__getitem__, cap, released).packed()
    return found


def cell_order(
    schedule: RoutedSchedule,
    stage: int,
    order: Sequence[RoutedAction],
    ranks: Sequence[Any],
    made: Callable[[RoutedMessage], Any],
    cap: float | None = None,
    released_at_backward_input: float = 0.0,
) -> CellOrder:
    """Return the order of a cell of `stage`. `ranks`: of its actions in an order of the actions of all cells. `made`:
    returns the rank of the action that makes a message.

    Receives are posted in the order of their senders' actions, each right before the first action that comes later. The
    proof of schedule.transfers.launch_order needs nothing else.
    """
    needed = [schedule.needed(stage, action) for action in order]
    awaited = sorted((made(message), place) for place, message in enumerate(needed) if message is not None)
    actions = []
    for action, message, rank in zip(order, needed, ranks, strict=True):
        sent = schedule.produced(stage, action)
        source = None if message is None else message.source.replica
        target = None if sent is None else sent.target.replica
        before = bisect.bisect_left(awaited, (rank,))
        kind = action.kind.value
        actions.append(CellAction(kind, action.chunk, action.replica, action.micro_batch, source, target, before))
    receives = tuple(place for _rank, place in awaited)
    return CellOrder(tuple(actions), receives, cap, released_at_backward_input)


def moved_by(routing: Routing) -> tuple[Moved, ...]:
    """Return the moves of `routing` for a decision."""
    return tuple(
        Moved(move.source.stage, move.source.replica, move.target.replica, len(move.micro_batches))
        for move in routing.moves()
    )


def schedule_of(orders: Mapping[str, str], replicas: int, stages: int, micro_batches: int) -> RoutedSchedule:
    """Return the schedule made of the packed orders of all cells. Raises ValueError if one is malformed."""
    hosts = [[0] * (replicas * micro_batches) for _ in range(stages)]
    found = [tuple[RoutedAction, ...]() for _ in range(replicas * stages)]
    for name, text in orders.items():
        host, stage = map(int, name.split("."))
        actions = CellOrder.unpacked(text).actions
        found[host * stages + stage] = tuple(
            RoutedAction(Kind(each.kind), each.replica, each.micro_batch, each.chunk) for each in actions
        )
        for each in actions:
            # A cell that runs the forward runs the backward, too.
            if each.kind == Kind.FORWARD.value:
                hosts[stage][each.replica * micro_batches + each.micro_batch] = host
    return RoutedSchedule(routing=Routing(replicas, micro_batches, tuple(map(tuple, hosts))), orders=tuple(found))


STRAGGLES = 1.15
"""A cell straggles if it takes this many times as long as the fastest of its stage."""
MOST_SHOWN = 256
"""Maximum number of cells whose figures are all sent: every rank receives them in every iteration."""

Tables = dict[str, tuple[tuple[float, ...], ...]]
"""Seconds by name of the table in `Costs`, then [stage][chunk]."""


def cell_tables(costs: Costs, estimates: Estimates, pipelines: Iterable[int]) -> Tables:
    """Return the seconds of one replica's cells as tables of `costs`. A cell counts as its slowest lane; one that has
    not been measured gets the seconds in `costs`. `pipelines`: first ranks of the replica's lanes."""
    lanes, found = tuple(pipelines), Tables()
    # Without split backwards, costs hold a whole backward as input gradient.
    split = any(map(any, costs.backward_weight_s))
    kinds = {"forward_s": "F", "backward_input_s": "I" if split else "B", "backward_weight_s": "W"}
    for name, kind in kinds.items():
        found[name] = tuple(
            tuple(
                max(_of_lanes(estimates, lanes, stage, kind, chunk), default=usual_s)
                for chunk, usual_s in enumerate(row)
            )
            for stage, row in enumerate(getattr(costs, name))
        )
    return found


def _of_lanes(estimates: Estimates, lanes: Iterable[int], stage: int, kind: str, chunk: int) -> list[float]:
    known = (estimates.stages.get(StageId(first, stage)) for first in lanes)
    durations = (lane.durations_s.get((kind, chunk)) for lane in known if lane is not None)
    return [seconds for seconds in durations if seconds is not None]


def seconds_of(tables: Sequence[Tables], without: Collection[Cell] = ()) -> dict[Cell, float]:
    """Return the seconds that a micro-batch takes at each cell. `tables`: by replica."""
    return {
        Cell(replica, stage): sum(sum(table[stage]) for table in found.values())
        for replica, found in enumerate(tables)
        for stage in range(len(found["forward_s"]))
        if Cell(replica, stage) not in without
    }


def cell_speeds(seconds: Mapping[Cell, float]) -> dict[Cell, float]:
    """Return the speed of each cell relative to the fastest of its stage, 0..1. `seconds`: of a micro-batch."""
    fastest: dict[int, float] = {}
    for cell, each_s in seconds.items():
        fastest[cell.stage] = min(each_s, fastest.get(cell.stage, each_s))
    return {cell: fastest[cell.stage] / each_s for cell, each_s in seconds.items() if fastest[cell.stage] > 0}


def stragglers(speeds: Mapping[Cell, float], pinned: Iterable[int] = ()) -> dict[Cell, float]:
    """Return the straggling cells, each with its time relative to the fastest cell of its stage. `pinned`: stages left
    out."""
    kept = set(pinned)
    return {cell: 1 / speed for cell, speed in speeds.items() if 1 / speed >= STRAGGLES and cell.stage not in kept}


def slowness(seconds: Mapping[Cell, float]) -> tuple[float, ...]:
    """Return the time of each replica's slowest cell relative to the fastest replica's; 1 if it does not straggle."""
    longest: dict[int, float] = {}
    for cell, each_s in sorted(seconds.items()):
        longest[cell.replica] = max(each_s, longest.get(cell.replica, 0.0))
    factors = [each_s / min(longest.values()) for each_s in longest.values()]
    return tuple(factor if factor >= STRAGGLES else 1.0 for factor in factors)


def cell_figures(speeds: Mapping[Cell, float], moves: Iterable[Move]) -> dict[tuple[int, int], CellFigures]:
    """Return figures by replica and stage: of all cells or, in a large job, of those that straggle or are rerouted."""
    given: Counter[Cell] = Counter()
    taken: Counter[Cell] = Counter()
    for move in moves:
        given[move.source] += len(move.micro_batches)
        taken[move.target] += len(move.micro_batches)
    shown = set(speeds) if len(speeds) <= MOST_SHOWN else {*stragglers(speeds), *given, *taken}
    return {
        (cell.replica, cell.stage): CellFigures(speed=speeds[cell], given=given[cell], taken=taken[cell])
        for cell in sorted(shown & set(speeds))
    }


logger = logger_of(__name__)

CHANGED = 1.08
"""Routes are planned again once a cell's time has changed by this factor, either way."""
LEAST_GAIN = 0.05
"""Share of an iteration that new routes must save."""


class RouteDecider:
    """Routes micro-batches around slow cells. Comes before the order's decider, which only decides while nothing is
    routed."""

    def __init__(
        self, policy: RoutePolicy, stages: int, telemetry: DecisionTelemetry, running: RoutingSection | None = None
    ) -> None:
        """`running`: the section decided before; None if none."""
        self._policy, self._telemetry = policy, telemetry
        self._count = 0 if running is None else running.number
        self._present: plans.Routing | None = None
        """The current routing; None if nothing is routed."""
        if running is not None and running.number:
            replicas, orders = len(policy.pipelines), running.orders
            self._present = schedule_of(orders, replicas, stages, running.micro_batches).routing
        self._speeds: Mapping[Cell, float] = {}
        """Latest speed of each cell; empty until all have been measured."""
        self._gain_s: float | None = None
        self._planned_for: Mapping[Cell, float] = {}
        """Seconds of a micro-batch at each cell, when routes were last planned."""
        self._refused = False
        self._slowness = () if running is None else running.slowness
        """Slowness of the replicas as last published."""

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Do nothing: the estimates in the context are enough."""

    def decide(self, context: Context) -> RoutingSection | None:
        """Return new routes if they are worth a switch. If nothing is routed, return the slowness of the replicas if
        it changed."""
        # Even without new routes: the order's decider must not plan for a pipeline by itself then.
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
        # Routes already balance the replicas, so slowness only counts without them.
        found, published = slowness(seconds), self._slowness or (1.0,) * len(tables)
        if self._present is not None or not any(_differ(*each) for each in zip(found, published, strict=True)):
            return None
        self._slowness = found
        return RoutingSection(0, context.micro_batches, slowness=found)

    def _routes(
        self, context: Context, known: Costs, tables: Sequence[Tables], seconds: Mapping[Cell, float]
    ) -> RoutingSection | None:
        # Costs that cannot be routed stay so: to try in each iteration would only repeat the warning.
        if self._refused:
            return None
        slow = stragglers(self._speeds, self._policy.pinned)
        same_size = self._present is None or self._present.micro_batches == context.micro_batches
        # Planning takes long: only once speeds have changed since the last time.
        if (not slow and self._present is None) or (same_size and not self._changed(seconds)):
            return None
        self._planned_for = seconds
        if not slow:
            return self._go_home(context)
        # Cells have no whole backwards of their own in their tables: these are the sum of the parts.
        costs = dataclasses.replace(known, backward_s=None)
        try:
            routed = RoutedCosts(
                job=job_of([costs.with_tables(each) for each in tables]), pinned=frozenset(self._policy.pinned)
            )
        except RoutingError as why:
            self._refused = True
            logger.warning("micro-batches cannot be routed around slow cells: %s", why)
            return None
        # Routes for another number of micro-batches cannot go on.
        present = self._present if same_size else None
        plan = plan_routed(routed, present=present, least_gain=LEAST_GAIN, split=any(map(any, costs.backward_weight_s)))
        return self._adopt(context, plan, slow, costs)

    def figures(self) -> RouteFigures | None:
        """Return figures of the cells and of the current routes; None until all cells have been measured."""
        if not self._speeds:
            return None
        moves = () if self._present is None else self._present.moves()
        return RouteFigures(cells=cell_figures(self._speeds, moves), predicted_gain_s=self._gain_s)

    def _changed(self, seconds: Mapping[Cell, float]) -> bool:
        before = self._planned_for
        return not before or any(_differ(seconds[cell], before[cell]) for cell in seconds)

    def _adopt(
        self, context: Context, plan: RoutedPlan, slow: Mapping[Cell, float], costs: Costs
    ) -> RoutingSection | None:
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
        return RoutingSection(self._count, plan.routing.micro_batches, moved, cell_orders(plan.simulation, costs))

    def _go_home(self, context: Context) -> RoutingSection | None:
        if self._present is None:
            return None
        micro_batches, self._present, context.routed = self._present.micro_batches, None, False
        self._gain_s = None
        reason = "no cell straggles any more: every micro-batch stays in its replica"
        context.change([reason])
        logger.debug("%s", reason)
        self._telemetry.log(RoutesChosen(number=context.number + 1, reason=reason))
        return RoutingSection(0, micro_batches)


def announce(
    telemetry: DecisionTelemetry,
    context: Context,
    plan: RoutedPlan,
    present_s: float | None,
    reason: Reason,
    slow: Mapping[Cell, float],
    speeds: Mapping[Cell, float],
) -> None:
    """Log that the next plan uses the routes of `plan`. `present_s`: seconds of an iteration by the current routes, at
    the same costs; None if unknown."""
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
    """Describe which cells straggle, and where their micro-batches go."""
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


# The leader's decisions on routes while cells are dead: live cells take all micro-batches.


class LiveCellDecider:
    """Plans the orders of all live cells while others are dead. Replaces the decider of a single pipeline's order.

    Every cell has the costs of the slowest pipeline, by stage and by link. If slow cells are avoided, too, each cell
    has its own seconds. With several chunks per stage, the first plan stays until the set of live cells changes.
    """

    def __init__(
        self, policy: RoutePolicy, stages: int, telemetry: DecisionTelemetry, running: RoutingSection | None
    ) -> None:
        """`running`: the section decided before, or planned when the set of live cells changed; None if
        unknown."""
        self._policy, self._telemetry = policy, telemetry
        self._count = 0 if running is None else running.number
        self._present: RoutedSchedule | None = None
        """The current schedule; None if unknown."""
        if running is not None and running.number:
            replicas = len(policy.pipelines)
            self._present = schedule_of(running.orders, replicas, stages, running.micro_batches)
        self._planned: RoutedCosts | None = None
        """Costs when routes were last planned."""
        self._speeds: Mapping[Cell, float] = {}
        """Latest speed of each live cell; empty until each stage has been measured."""
        self._gain_s: float | None = None

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Do nothing: the estimates in the context are enough."""

    def decide(self, context: Context) -> RoutingSection | None:
        """Return new routes and orders if they are worth a switch."""
        # While cells are dead, no pipeline is whole: the order's decider must not plan for one.
        context.routed = True
        if context.costs is None or context.costs.chunks > 1:
            return None
        known = cell_costs(context.costs)
        tables = [cell_tables(known, context.estimates, lanes) for lanes in self._policy.pipelines]
        self._speeds = cell_speeds(seconds_of(tables, without=self._policy.dead))
        job = JobCosts(known, replicas=len(tables))
        if self._policy.avoids_slow:
            job = job_of([known.with_tables(each) for each in tables])
        routed = RoutedCosts(job=job, dead=frozenset(self._policy.dead))
        reason = self._reason(context, routed)
        if not reason:
            return None
        self._planned = routed
        return self._plan(context, routed, reason)

    def figures(self) -> RouteFigures | None:
        """Return figures of the cells and of the current routes; None until each stage has been measured."""
        if not self._speeds:
            return None
        moves = () if self._present is None else self._present.routing.moves()
        return RouteFigures(cells=cell_figures(self._speeds, moves), predicted_gain_s=self._gain_s)

    def _reason(self, context: Context, costs: RoutedCosts) -> Reason:
        """Return why planning is due; empty if it is not."""
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

    def _plan(self, context: Context, costs: RoutedCosts, reason: Reason) -> RoutingSection | None:
        # The gain counts against the current schedule at the new costs, not at those it was planned for.
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
        return RoutingSection(self._count, context.micro_batches, moved_by(plan.routing), orders)


def _pays(plan: RoutedPlan, runs: RoutedSimulation, costs: RoutedCosts) -> bool:
    """Return whether `plan` saves enough, or the current schedule (`runs`) would exceed the memory of a stage."""
    if plan.simulation.period_s <= (1.0 - LEAST_GAIN) * runs.period_s:
        return True
    stages, peaks = costs.stages, runs.peak_in_flight
    replicas = range(costs.job.replicas)
    return any(costs.replicas[each].stages_over_cap(peaks[each * stages : (each + 1) * stages]) for each in replicas)
