# SPDX-License-Identifier: Apache-2.0
"""Plays schedules on paper: the records that a real run with exactly these costs would leave."""

from __future__ import annotations

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.trace import RankTrace


def played(schedule: Schedule, costs: Costs, *, iteration: int = 0, start_s: float = 0.0) -> list[ActionRecord]:
    """Records of one iteration in the schedule's order; links have latency only."""
    records: list[ActionRecord] = []
    ends_s: dict[Action, float] = {}
    todo = [list(order) for order in schedule.orders]
    free_s = [start_s] * schedule.stages
    while any(todo):
        progress = False
        for stage, order in enumerate(todo):
            while order and (arrival_s := _arrival_s(order[0], schedule, costs, ends_s, start_s)) is not None:
                action = order.pop(0)
                begin_s = max(free_s[stage], arrival_s)
                end_s = begin_s + _seconds(action, costs)
                records.append(
                    ActionRecord(
                        iteration,
                        stage,
                        action.kind.value,
                        action.chunk,
                        action.micro_batch,
                        free_s[stage],
                        begin_s,
                        end_s,
                    )
                )
                ends_s[action._replace(combined=False)] = free_s[stage] = end_s
                progress = True
        assert progress, "the schedule deadlocks"
    return records


def rank_traces(records: list[ActionRecord]) -> list[RankTrace]:
    """One rank per stage."""
    stages = sorted({record.stage for record in records})
    return [
        RankTrace(rank=stage, stage=stage, records=tuple(record for record in records if record.stage == stage))
        for stage in stages
    ]


def _seconds(action: Action, costs: Costs) -> float:
    table = {
        Kind.FORWARD: costs.forward_s,
        Kind.BACKWARD: costs.whole_backward_s,
        Kind.BACKWARD_INPUT: costs.backward_input_s,
        Kind.BACKWARD_WEIGHT: costs.backward_weight_s,
    }[action.kind]
    return table[action.stage][action.chunk]


def _arrival_s(
    action: Action, schedule: Schedule, costs: Costs, ends_s: dict[Action, float], start_s: float
) -> float | None:
    """When what `action` needs from another stage is there; None while that has not run."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return start_s
    placement = schedule.placement
    forward = action.kind is Kind.FORWARD
    place = (placement.previous_place if forward else placement.next_place)(action.stage, action.chunk)
    if place is None:
        return start_s
    stage, chunk = place
    kinds = (Kind.FORWARD,) if action.kind is Kind.FORWARD else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    for kind in kinds:
        sender = Action(stage, kind, chunk, action.micro_batch)
        if sender in ends_s:
            return ends_s[sender] + costs.link(stage, action.stage).latency_s
    return None
