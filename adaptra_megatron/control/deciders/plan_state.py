# SPDX-License-Identifier: Apache-2.0
"""Choose the schedule of an iteration, and decide when a new one is worth a switch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import Reason, joined, reason_fields
from adaptra_megatron.config import AdaptraConfig, read_costs, read_plan
from adaptra_megatron.control.decisions import Decision, Order, TelemetrySection
from adaptra_megatron.schedule.classic import forward_only, split_every_other, stock_order
from adaptra_megatron.schedule.costs import NO_COST, Costs, Released, costs_to_json, released_per_stage, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.more_memory import Bought, more_memory
from adaptra_megatron.schedule.periods import period_s, plan_for_period
from adaptra_megatron.schedule.planner import Plan, plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.telemetry.events.events import MemoryWanted, PlanMade

logger = logger_of(__name__)

RELEASED_AT_BACKWARD_INPUT = 0.0
"""Megatron's native layers keep inputs and output gradients of their linears until W: about the whole activation."""
PLANNING_S = 0.2
"""Work on one plan, on one core of the leading rank, concurrently with training."""


class PlanMismatchError(ValueError):
    """A given plan is for other iterations than those that run."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pipeline a plan is for."""

    stages: int
    chunks: int
    group_size: int | None
    rendezvous: bool = False
    """True where a message of the device path starts only when its receive has been posted, as over NCCL."""
    shared_queue: bool = False
    """True where a stage's computation and its messages of that path stand in one hardware queue."""
    serial_queue: bool = False
    """True if plans are to reckon with that each of them waits there for the end of the one before."""
    whole_first: bool = False
    """True where backwards run whole until memory has been measured: where layers are recomputed within the backward, a
    W that waits holds what they hold, and an activation does not."""
    staggered: bool = False
    """True where stages begin an iteration when their own part of the one before is over."""

    def plan(self, costs: Costs, *, deadline_s: float, patience_s: float = 0.0, split: bool = True) -> Plan:
        """The best schedule for its iterations; see `schedule.planner.plan`."""
        planner = plan_for_period if self.staggered else plan
        return planner(costs, deadline_s=deadline_s, patience_s=patience_s, split=split)

    def iteration_s(self, schedule: Schedule, costs: Costs) -> float:
        """Seconds that an iteration of `schedule` takes."""
        return period_s(schedule, costs) if self.staggered else simulate(schedule, costs).makespan_s


Caps = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class _Installed:
    schedule: Schedule
    caps: Caps
    released_at_backward_input: Released = RELEASED_AT_BACKWARD_INPUT
    costs: Costs | None = None


class PlanState:
    """The schedule to run, from a file, from costs, or stock's until there is something better.

    Every rank has one. Plans from a file or from given costs are computed by every rank alike; measured ones are
    computed by one rank and installed by all.
    """

    def __init__(self, config: AdaptraConfig, layout: Layout, *, measures_memory: bool = False) -> None:
        """`measures_memory`: whether caps, where none was given, come from the memory that ranks measure."""
        self.layout = layout
        self.measures_memory = measures_memory
        self.number = 0
        """Counts installed plans; 0 while none is."""
        self._config = config
        self.policy = config.policy
        """What runs by: "adapt", "observe", or "off", which is that nothing is measured and told either."""
        self._plans: dict[int, _Installed] = {}
        """By number of micro-batches."""
        self._stock: dict[int, Schedule] = {}
        self._peaks: dict[int, Sequence[float]] = {}
        """Peaks of stock's order, by number of micro-batches."""
        self._evaluation: dict[int, Schedule] = {}
        self._given_costs: Costs | None = None
        if config.costs_json is not None:
            self._given_costs = read_costs(config.costs_json, stages=layout.stages, chunks=layout.chunks)
        if config.plan_csv is not None:
            self._install_file(config.plan_csv)

    @property
    def observes(self) -> bool:
        """Return whether stock's order runs, and nothing is decided."""
        return self.policy != "adapt"

    @property
    def adapts(self) -> bool:
        """Return whether measured costs decide on the order."""
        return self.policy == "adapt" and self._config.plan_csv is None and self._given_costs is None

    def follow(self, policy: str) -> None:
        """Go by another policy. What was planned for measured costs is forgotten, so that all ranks begin anew."""
        self.policy = policy
        if self._config.plan_csv is None and self._given_costs is None:
            self._plans.clear()

    def caps(self, micro_batches: int, rooms: Mapping[int, int] | None = None) -> Caps:
        """Activations each stage may hold in a planned order: the given cap, or else what there is memory for.

        `rooms`: that, by stage, where it has been measured; never less counts than what stock's order holds there.
        Where memory is not measured at all, every stage may hold what stock's fullest stage holds.
        """
        layout = self.layout
        if self._config.max_in_flight is not None:
            return (self._config.max_in_flight,) * layout.stages
        stock = self._stock_peaks(micro_batches)
        if not self.measures_memory:
            return (max(stock),) * layout.stages
        most = micro_batches * layout.chunks
        rooms = rooms or {}
        return tuple(max(held, min(rooms.get(stage, 0), most)) for stage, held in enumerate(stock))

    def enforced_cap(self, micro_batches: int, stage: int) -> float | None:
        """Return what the executor must not pass; None where no cap was set: stock's order, or a user's own plan."""
        installed = None if self.observes else self._plans.get(micro_batches)
        return None if installed is None else installed.caps[stage]

    def released_at_backward_input(self, micro_batches: int, stage: int) -> float:
        """The fraction that the cap's count gives back after an input gradient; below 0, it takes more."""
        installed = self._plans.get(micro_batches)
        released = RELEASED_AT_BACKWARD_INPUT if installed is None else installed.released_at_backward_input
        return released_per_stage(released, self.layout.stages)[stage]

    def planned_for(self, micro_batches: int) -> Costs | None:
        """The costs that `schedule_for` was planned for, equal on all ranks; None where it was made without."""
        installed = self._plans.get(micro_batches)
        return None if installed is None else installed.costs

    def check_count(self, micro_batches: int, *, forward_only: bool) -> None:
        """Raise ScheduleError for a number of micro-batches that Megatron refuses, and PlanMismatchError, for training,
        where the given plan is for another one."""
        self.evaluation_schedule(micro_batches)
        if forward_only or self.observes or self._config.plan_csv is None or micro_batches in self._plans:
            return
        (planned_for,) = self._plans
        raise PlanMismatchError(
            f"--adaptra-plan-csv {self._config.plan_csv} is a plan for {planned_for} micro-batches, but an "
            f"iteration has {micro_batches}; write a plan for {micro_batches}, or drop --rampup-batch-size"
        )

    def schedule_for(self, micro_batches: int) -> Schedule:
        """The schedule for an iteration of `micro_batches`. Raises PlanError, and as `check_count`."""
        self.check_count(micro_batches, forward_only=False)
        if self.observes:
            return self._stock_schedule(micro_batches)
        if micro_batches not in self._plans:
            if self._given_costs is not None:
                self._install_given(self._given_costs, micro_batches)
            else:
                caps = self.caps(micro_batches)
                self._plans[micro_batches] = _Installed(self.calibration_schedule(micro_batches), caps)
        return self._plans[micro_batches].schedule

    def evaluation_schedule(self, micro_batches: int) -> Schedule:
        """Forwards alone, in stock's order."""
        if micro_batches not in self._evaluation:
            layout = self.layout
            self._evaluation[micro_batches] = forward_only(
                layout.stages, micro_batches, layout.chunks, layout.group_size
            )
        return self._evaluation[micro_batches]

    def whole_schedule(self, micro_batches: int) -> Schedule:
        """Stock's order with whole backwards, or where that would hold more than the caps allow one that keeps them."""
        installed = self._plans.get(micro_batches)
        caps = self.caps(micro_batches) if installed is None else installed.caps
        return self._order_of_equal_costs(micro_batches, caps, split=False)

    def install(
        self,
        schedule: Schedule,
        number: int,
        caps: Caps,
        released: Released = RELEASED_AT_BACKWARD_INPUT,
        costs: Costs | None = None,
    ) -> None:
        """Run `schedule` from now on. Raises ScheduleError and changes nothing if it is not valid under the caps.

        `released`: the fraction of an activation that input gradients give back, by which the caps count. `costs`: what
        it was planned for.
        """
        check_schedule(schedule, max_in_flight=caps, released_at_backward_input=released)
        self._plans.pop(schedule.micro_batches, None)  # the latest is the last
        self._plans[schedule.micro_batches] = _Installed(schedule, caps, released, costs)
        self.number = number

    @property
    def in_force(self) -> Decision:
        """Return what was planned last, as it travels; without an order where none was planned for measured costs."""
        told = None if self.policy == self._config.policy else TelemetrySection(policy=self.policy)
        latest = next((each for each in reversed(self._plans.values()) if each.costs is not None), None)
        if latest is None or latest.costs is None or self.observes:
            return Decision(self.number, told=told)
        order = Order(
            schedule_to_csv(latest.schedule),
            json.dumps(costs_to_json(latest.costs)),
            latest.caps,
            released_per_stage(latest.released_at_backward_input, self.layout.stages),
        )
        return Decision(self.number, order, told=told)

    def forget(self) -> None:
        """Let all plans go that came of measured costs."""
        self._plans.clear()
        self.number = 0

    def _stock_schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._stock:
            layout = self.layout
            self._stock[micro_batches] = stock_order(layout.stages, micro_batches, layout.chunks, layout.group_size)
        return self._stock[micro_batches]

    def _stock_peaks(self, micro_batches: int) -> Sequence[float]:
        if micro_batches not in self._peaks:
            self._peaks[micro_batches] = peak_in_flight(self._stock_schedule(micro_batches), RELEASED_AT_BACKWARD_INPUT)
        return self._peaks[micro_batches]

    def calibration_schedule(self, micro_batches: int) -> Schedule:
        """Return what runs until costs are known: stock's order with every other B as I and W, if that is within the
        caps."""
        return self._order_of_equal_costs(micro_batches, self.caps(micro_batches), split=not self.layout.whole_first)

    def _order_of_equal_costs(self, micro_batches: int, caps: Caps, *, split: bool) -> Schedule:
        layout, stock = self.layout, self._stock_schedule(micro_batches)
        if all(cap is None or peak <= cap for peak, cap in zip(self._stock_peaks(micro_batches), caps, strict=True)):
            return split_every_other(stock) if split else stock
        equal = uniform_costs(
            layout.stages,
            micro_batches,
            chunks=layout.chunks,
            forward_s=1.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            released_at_backward_input=RELEASED_AT_BACKWARD_INPUT,
        )
        equal = dataclasses.replace(equal, max_in_flight=caps)
        return plan(equal, split=split).schedule

    def _install_file(self, path: Path) -> None:
        layout, cap = self.layout, self._config.max_in_flight
        schedule = read_plan(path, stages=layout.stages, chunks=layout.chunks, max_in_flight=cap)
        # A user's own plan: the cap counts only if the user has set one.
        self.install(schedule, 1, (cap,) * layout.stages)
        if schedule.splits_backward and layout.whole_first:
            logger.warning("%s splits backwards under full recompute: each pending W holds whole layers", path)

    def _install_given(self, costs: Costs, micro_batches: int) -> None:
        caps = costs.max_in_flight
        if self._config.max_in_flight is not None or all(cap is None for cap in caps):
            caps = self.caps(micro_batches)
        costs = dataclasses.replace(
            costs,
            micro_batches=micro_batches,
            max_in_flight=caps,
            released_at_backward_input=(RELEASED_AT_BACKWARD_INPUT,) * costs.stages,
        )
        chosen = self.layout.plan(costs, deadline_s=PLANNING_S, split=not self.layout.whole_first)
        self.install(chosen.schedule, self.number + 1, caps, costs=costs)


PLANNING_SHARE = 0.1
"""Share of an iteration that planning may take, where that is less than `PLANNING_S`."""
PATIENCE_SHARE, PATIENCE_S = 0.5, 2.0
"""The same, while the plan may be more than 1% above the best one: then it is there before the iteration is over."""
MOST_CAPS_NAMED = 3
"""Of those that more memory would buy."""
WORTH_A_SWITCH = 0.02
"""Predicted gain below which a running plan is kept."""
AS_FAST = 0.002
"""A plan that takes no more than this longer is as fast, and replaces one that holds many more activations:"""
WORTH_SAVING = 0.5
"""per stage, on average."""
MATERIAL_CHANGE = 0.1
"""Change of a cost, relative to the mean action, that makes planning anew worth the effort."""


class Replanner:
    """Decides, on one rank, whether measured costs call for another schedule."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._planned: Costs | None = None
        self._bound_by_memory: Plan | None = None
        """The plan for `_planned`, until it has been said what more memory would buy."""

    def decide(
        self, costs: Costs, current: Schedule, found: Sequence[Reason] = (), changed: Sequence[Reason] = ()
    ) -> tuple[Schedule | None, PlanMade | None]:
        """A schedule to switch to, or None to keep `current`; and, where one was planned, the event. Logs why.

        `found`: what the detector has just found, and `changed`: what other deciders change in the plan; planning is
        then due whatever the costs say.
        """
        reason = joined([*found, *changed])
        if not reason and self._planned is not None:
            change = material_change(self._planned, costs)
            if change is None:
                return None, None
            reason = change
        reason, self._planned = reason or "first costs", costs
        comparable = current.micro_batches == costs.micro_batches
        now_s = self._layout.iteration_s(current, costs) if comparable else float("inf")
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
        """Return what more memory would buy, once per plan that a cap binds. To be asked for in an iteration that has
        nothing to decide, so that nothing is late."""
        plan, costs = self._bound_by_memory, self._planned
        if plan is None or costs is None:
            return None
        self._bound_by_memory = None
        bought = more_memory(
            costs, lambda other: self._layout.plan(other, deadline_s=0.0).makespan_s, within_s=plan.makespan_s
        )
        return memory_wanted(costs, plan.makespan_s, bought[:MOST_CAPS_NAMED]) if bought else None


def memory_wanted(costs: Costs, makespan_s: float, bought: Sequence[Bought]) -> MemoryWanted:
    """Return what a plan within the caps takes, and what higher caps would give."""
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
    """Slowest stage and link, for the log."""
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


def material_change(before: Costs, after: Costs) -> str | None:
    """The largest difference, in words, if it can matter to a plan: a cost moved by a tenth of the mean action."""
    if before.micro_batches != after.micro_batches:
        return f"{after.micro_batches} micro-batches instead of {before.micro_batches}"
    all_s = [seconds for table in after.tables().values() for row in table for seconds in row]
    threshold_s = MATERIAL_CHANGE * sum(all_s) / len(all_s)
    if (before.max_in_flight, before.released_at_backward_input) != (
        after.max_in_flight,
        after.released_at_backward_input,
    ):
        return _change_of_memory(before, after)
    what, old_s, new_s = max(_pairs(before, after), key=lambda pair: abs(pair[2] - pair[1]))
    if abs(new_s - old_s) <= threshold_s:
        return None
    return f"{what}: {new_s * 1e3:.1f} ms instead of {old_s * 1e3:.1f} ms"


def _change_of_memory(before: Costs, after: Costs) -> str:
    for stage, (old, new) in enumerate(zip(before.max_in_flight, after.max_in_flight, strict=True)):
        if old != new and old is not None and new is not None:
            return f"stage {stage} may hold {new:g} activations instead of {old:g}"
    pairs = zip(before.released_at_backward_input, after.released_at_backward_input, strict=True)
    stage, (old, new) = next((stage, pair) for stage, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"input gradients of stage {stage} release {new:g} of an activation instead of {old:g}"


def _over_cap(held: Sequence[float], costs: Costs) -> str | None:
    """The first stage that would hold more than it may, in words. `held`: activations of each."""
    for stage in costs.stages_over_cap(held):
        cap = costs.max_in_flight[stage]
        return f"stage {stage} would hold {held[stage]:g} activations, but has memory for {cap:g}"
    return None


def _saved_memory(held: Sequence[float], planned: Sequence[float]) -> str | None:
    """Return how much less stages hold under a plan than now, in words, if it is worth a switch."""
    if sum(planned) > sum(held) - WORTH_SAVING * len(held):
        return None
    return f"it holds {sum(planned):g} activations instead of {sum(held):g}"


_KINDS = {
    "forward_s": "F",
    "backward_input_s": "input gradient",
    "backward_weight_s": "weight gradient",
    "backward_s": "whole backward",
}


def _pairs(before: Costs, after: Costs) -> Iterator[tuple[str, float, float]]:
    """Every cost with its name, as it was and as it is."""
    old_tables = before.tables() | {"backward_s": before.whole_backward_s}
    for name, table in after.tables().items():
        for stage, rows in enumerate(zip(old_tables[name], table, strict=True)):
            for chunk, (old_s, new_s) in enumerate(zip(*rows, strict=True)):
                yield f"{_KINDS[name]} of stage {stage}, chunk {chunk}", old_s, new_s
    for source, target in sorted({*before.links, *after.links}):
        old, new = before.link(source, target), after.link(source, target)
        yield f"latency of link {source}->{target}", old.latency_s, new.latency_s
        yield f"occupancy of link {source}->{target}", old.occupancy_s, new.occupancy_s
