# SPDX-License-Identifier: Apache-2.0
"""Finds orders of stages that wait on each other for ever, and says which waits for which."""

from __future__ import annotations

from adaptra_megatron.schedule.actions import Action, Kind, Schedule
from adaptra_megatron.schedule.errors import ScheduleError


def check_progress(schedule: Schedule) -> None:
    """Run the orders without a clock; raise ScheduleError naming the cycle of waits if they stop before the end.

    The orders must be complete and per chunk ascending in micro-batches, as `checks.check_schedule` makes sure first.
    """
    stages, placement, last = schedule.stages, schedule.placement, schedule.virtual_stages - 1
    chunks = range(schedule.chunks)
    virtual_stages = [[placement.virtual_stage(stage, chunk) for chunk in chunks] for stage in range(stages)]
    peers = [placement.peers(stage) for stage in range(stages)]
    forwards = [0] * (last + 1)
    backwards = [0] * (last + 1)
    positions = [0] * stages
    runnable = list(range(stages))
    while runnable:
        stage = runnable.pop()
        order = schedule.orders[stage]
        start = position = positions[stage]
        while position < len(order):
            _, kind, chunk, micro_batch = order[position]
            virtual = virtual_stages[stage][chunk]
            if kind is Kind.FORWARD:
                if virtual > 0 and forwards[virtual - 1] <= micro_batch:
                    break
                forwards[virtual] += 1
            elif kind is not Kind.BACKWARD_WEIGHT:
                if virtual < last and backwards[virtual + 1] <= micro_batch:
                    break
                backwards[virtual] += 1
            position += 1
        positions[stage] = position
        if position > start:
            runnable += peers[stage]
    blocked = {
        stage: order[positions[stage]] for stage, order in enumerate(schedule.orders) if positions[stage] < len(order)
    }
    if blocked:
        _fail(schedule, blocked)


def _fail(schedule: Schedule, blocked: dict[int, Action]) -> None:
    """Every blocked stage waits for another blocked one, so following the waits from any of them ends in a cycle."""
    stage = next(iter(blocked))
    path: list[int] = []
    while stage not in path:
        path.append(stage)
        stage = _needed(schedule, blocked[stage]).stage
    cycle = path[path.index(stage) :]
    waits = "; ".join(f"{blocked[stage]} waits for {_needed(schedule, blocked[stage])}" for stage in cycle)
    remedy = _needed(schedule, blocked[cycle[-1]])
    raise ScheduleError(
        f"deadlock, each of these stands in its stage's order in front of what the next one waits for: {waits}. "
        f"Move {remedy} in front of {blocked[remedy.stage]}",
        stage=cycle[0],
        action=blocked[cycle[0]],
    )


def _needed(schedule: Schedule, action: Action) -> Action:
    """The action of another virtual stage whose message `action` waits for; a backward may be whole or split there."""
    placement, forward = schedule.placement, action.kind is Kind.FORWARD
    place = (placement.previous_place if forward else placement.next_place)(action.stage, action.chunk)
    assert place is not None, "what needs no message is never blocked"
    stage, chunk = place
    if forward:
        return Action(stage, Kind.FORWARD, chunk, action.micro_batch)
    return next(
        other
        for other in schedule.orders[stage]
        if other.kind.sends_gradient and (other.chunk, other.micro_batch) == (chunk, action.micro_batch)
    )
