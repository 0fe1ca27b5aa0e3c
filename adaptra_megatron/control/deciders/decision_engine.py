# SPDX-License-Identifier: Apache-2.0
"""Turn the measurements of a replica into decisions: run the detector, then each decider, the one of orders last."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import Reason, joined, reason_fields
from adaptra_megatron.control.deciders.combined_savings import CombinedSavings
from adaptra_megatron.control.deciders.decider import (
    MATERIAL_CHANGE,
    Context,
    Decider,
    DecisionTelemetry,
    InUse,
    estimate_costs,
    iteration_sample,
    link_figures,
    material_change,
    paths_in_use,
)
from adaptra_megatron.control.deciders.path_decider import PathDecider
from adaptra_megatron.control.deciders.plan_state import PLANNING_S, Caps, Layout, PlanState
from adaptra_megatron.control.deciders.route_decider import LiveCellDecider, RouteDecider
from adaptra_megatron.control.deciders.switch_costs import DeferredSwitch
from adaptra_megatron.control.decisions import Decision, Forecast, Order, PackedFigures, Paths, TelemetrySection
from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import (
    Estimates,
    Finding,
    IterationSample,
    LinkId,
)
from adaptra_megatron.control.measurements import StageMeasurement, mean_idle_share
from adaptra_megatron.control.sidecar.planner_client import PathPolicy, RoutePolicy
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.schedule.costs import NO_COST, Costs, costs_to_json
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.more_memory import Bought, more_memory
from adaptra_megatron.schedule.periods import period_s
from adaptra_megatron.schedule.planner import Plan
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.telemetry.events import (
    LinkDetection,
    MemoryWanted,
    PlanMade,
    PolicyChanged,
    StageDetection,
)
from adaptra_megatron.telemetry.scalars import JobFigures, MemoryFigures

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


PLANNING_SHARE = 0.1
"""Share of an iteration that planning may take, if that is less than `PLANNING_S`."""
PATIENCE_SHARE, PATIENCE_S = 0.5, 2.0
"""Share and seconds for a plan that may still be more than 1% above the best one; it is then ready within the
iteration."""
MOST_CAPS_NAMED = 3
"""Number of caps that an event about more memory names at most."""
WORTH_A_SWITCH = 0.02
"""Share of an iteration that a new plan must save."""
AS_FAST = 0.002
"""A plan within this share of the current time counts as equally fast. It is adopted if it saves this much memory:"""
WORTH_SAVING = 0.5
"""activations per stage, on average."""


class Replanner:
    """Decides on the leader whether measured costs call for another schedule."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._planned: Costs | None = None
        self._bound_by_memory: Plan | None = None
        """The latest plan if memory limits it, until `worth_of_memory` has used it."""

    def decide(
        self, costs: Costs, current: Schedule, found: Sequence[Reason] = (), changed: Sequence[Reason] = ()
    ) -> tuple[Schedule | None, PlanMade | None]:
        """Return a schedule to switch to (None: keep `current`) and the event of the planning (None: nothing planned).

        `found`: what the detector has just found. `changed`: what other deciders change in the plan. Either calls for
        planning, even if costs have not changed.
        """
        reason = joined([*found, *changed])
        if not reason and self._planned is not None:
            change = material_change(self._planned, costs)
            if change is None:
                return None, None
            reason = change
        reason, self._planned = reason or "first costs", costs
        comparable = current.micro_batches == costs.micro_batches
        now_s = iteration_s(self._layout, current, costs) if comparable else float("inf")
        # What is there before an iteration is over takes effect in the next but one; what is late, later.
        deadline_s = min(PLANNING_S, PLANNING_SHARE * now_s)
        patience_s = min(PATIENCE_S, PATIENCE_SHARE * now_s) if comparable else 0.0
        begun_s = time.perf_counter()
        candidate = self._layout.plan(costs, deadline_s=deadline_s, patience_s=patience_s)
        self._bound_by_memory = candidate if candidate.lower_bound.kind == "memory" else None
        held = peak_in_flight(current, costs.released_at_backward_input)
        over = _over_cap(held, costs)
        saved = None
        if candidate.makespan_s <= (1.0 + AS_FAST) * now_s and comparable:
            saved = _saved_memory(held, candidate.peak_in_flight)
        adopted = over is not None or saved is not None or candidate.makespan_s <= (1.0 - WORTH_A_SWITCH) * now_s
        reason = joined(part for part in (reason, over or saved) if part is not None)
        made = PlanMade(
            number=0,
            adopted=adopted,
            **reason_fields(reason),
            memory=over or saved or "",
            findings=len(found),
            predicted_s=candidate.makespan_s if adopted else now_s,
            current_predicted_s=now_s,
            lower_bound_s=candidate.lower_bound.seconds,
            planning_s=time.perf_counter() - begun_s,
            costs=costs_to_json(costs),
        )
        if not adopted:
            logger.debug("plan kept: %.1f ms, best %.1f ms; %s", now_s * 1e3, candidate.makespan_s * 1e3, made.reason)
            return None, made
        logger.debug(
            "new plan: %.1f ms instead of %.1f ms, lower bound %.1f ms; %s; %s",
            candidate.makespan_s * 1e3,
            now_s * 1e3,
            candidate.lower_bound.seconds * 1e3,
            made.reason,
            describe(costs),
        )
        return candidate.schedule, made

    def worth_of_memory(self) -> MemoryWanted | None:
        """Return how much faster plans with more memory would be; None if memory does not limit the plan, or it has
        been returned before. Takes long: call it in an iteration without a decision."""
        plan, costs = self._bound_by_memory, self._planned
        if plan is None or costs is None:
            return None
        self._bound_by_memory = None
        bought = more_memory(
            costs, lambda other: self._layout.plan(other, deadline_s=0.0).makespan_s, within_s=plan.makespan_s
        )
        return memory_wanted(costs, plan.makespan_s, bought[:MOST_CAPS_NAMED]) if bought else None


def iteration_s(layout: Layout, schedule: Schedule, costs: Costs) -> float:
    """Return the seconds of an iteration of `schedule`."""
    return period_s(schedule, costs) if layout.staggered else simulate(schedule, costs).makespan_s


def memory_wanted(costs: Costs, makespan_s: float, bought: Sequence[Bought]) -> MemoryWanted:
    """Return the event: the time of the plan within the caps, and of plans with higher caps (`bought`)."""
    (source, target), cost = max(costs.links.items(), key=lambda item: item[1].transfer_s, default=((0, 0), NO_COST))
    slow = cost.transfer_s > MATERIAL_CHANGE * costs.forward_s[source][0]
    return MemoryWanted(
        held=max(cap for cap in costs.max_in_flight if cap is not None),
        predicted_s=makespan_s,
        caps={str(cap): seconds for cap, seconds in bought},
        source=min(source, target) if slow else None,
        target=max(source, target) if slow else None,
    )


def describe(costs: Costs) -> str:
    """Describe the slowest stage and link, for the log."""
    work_s = [
        costs.micro_batches * (sum(forward) + sum(backward))
        for forward, backward in zip(costs.forward_s, costs.whole_backward_s, strict=True)
    ]
    stage = max(range(costs.stages), key=work_s.__getitem__)
    text = f"slowest stage {stage}, {work_s[stage] * 1e3:.1f} ms of work"
    if costs.links:
        (source, target), cost = max(costs.links.items(), key=lambda item: item[1].latency_s)
        text += f"; slowest link {source}->{target}, {cost.latency_s * 1e3:.1f} ms"
    return text


def _over_cap(held: Sequence[float], costs: Costs) -> str | None:
    """Describe the first stage that would exceed its cap; None if none would. `held`: activations by stage."""
    for stage in costs.stages_over_cap(held):
        cap = costs.max_in_flight[stage]
        return f"stage {stage} would hold {held[stage]:g} activations, but has memory for {cap:g}"
    return None


def _saved_memory(held: Sequence[float], planned: Sequence[float]) -> str | None:
    """Describe how much less memory a plan takes than now; None if that is not worth a switch. Activations by stage."""
    if sum(planned) > sum(held) - WORTH_SAVING * len(held):
        return None
    return f"it holds {sum(planned):g} activations instead of {sum(held):g}"


# The leading rank's decisions on the order of actions.


class OrderDecider:
    """Decides on the order of actions. Comes last: it plans with the costs that the other deciders change."""

    def __init__(self, book: PlanState, telemetry: DecisionTelemetry, running: Order | None = None) -> None:
        """`book`: holds the order that runs before the first plan. `running`: the order decided before; None
        if none."""
        self._book, self._telemetry = book, telemetry
        self._replanner, self._switch = Replanner(book.layout), DeferredSwitch()
        self._running: dict[int, Schedule] = {}
        """By number of micro-batches."""
        if running is not None:
            schedule = running.schedule()
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
        chosen, made = self._switch.decide(
            self._replanner.decide(costs, current, why, context.reasons),
            current,
            max(each.switch_s for each in context.latest),
            urgent=bool(costs.stages_over_cap(peak_in_flight(current, costs.released_at_backward_input))),
        )
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
        return Order.of(chosen, costs)


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
        """`book`: holds layout, caps and the order that runs before the first plan. `paths`: None if links
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
        planned_for = () if running.order is None else running.order.costs.combined_saving
        counts = book.layout.stages, book.layout.chunks
        self._savings = CombinedSavings(*counts, planned_for) if book.layout.combined else None
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
        if self._savings is not None:
            for measurements in rounds:
                self._savings.observe(measurements, estimates)
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
            combined_saving=() if self._savings is None else self._savings.table(),
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
