# SPDX-License-Identifier: Apache-2.0
"""Decide when a new schedule is worth a switch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import Reason, joined, reason_fields
from adaptra_megatron.control.deciders.plan_state import PLANNING_S, Layout
from adaptra_megatron.schedule.costs import NO_COST, Costs, costs_to_json
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.more_memory import Bought, more_memory
from adaptra_megatron.schedule.periods import period_s
from adaptra_megatron.schedule.planner import Plan
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.telemetry.events import MemoryWanted, PlanMade

logger = logger_of(__name__)

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
MATERIAL_CHANGE = 0.1
"""Change of a cost, relative to the mean action, that calls for planning again."""


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


def material_change(before: Costs, after: Costs) -> str | None:
    """Describe the largest difference, if it is large enough to change a plan (see MATERIAL_CHANGE); None otherwise."""
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


_KINDS = {
    "forward_s": "F",
    "backward_input_s": "input gradient",
    "backward_weight_s": "weight gradient",
    "backward_s": "whole backward",
}


def _pairs(before: Costs, after: Costs) -> Iterator[tuple[str, float, float]]:
    """Yield each cost: its name, its seconds before, its seconds now."""
    old_tables = before.tables() | {"backward_s": before.whole_backward_s}
    for name, table in after.tables().items():
        for stage, rows in enumerate(zip(old_tables[name], table, strict=True)):
            for chunk, (old_s, new_s) in enumerate(zip(*rows, strict=True)):
                yield f"{_KINDS[name]} of stage {stage}, chunk {chunk}", old_s, new_s
    for source, target in sorted({*before.links, *after.links}):
        old, new = before.link(source, target), after.link(source, target)
        yield f"latency of link {source}->{target}", old.latency_s, new.latency_s
        yield f"occupancy of link {source}->{target}", old.occupancy_s, new.occupancy_s
