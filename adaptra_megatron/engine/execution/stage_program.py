# SPDX-License-Identifier: Apache-2.0
"""Compile a stage's order of actions, once per plan, into steps for the executor."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.transfers.launch_order import (
    LaunchRanks,
    OrderedMessage,
    launch_ranks,
    needed,
    produced,
    receives_at_ends,
    receives_before,
    start_ranks,
)


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One action with its messages."""

    position: int
    """Position in the plan's order of its stage."""
    action: Action
    receive: OrderedMessage | None
    send: OrderedMessage | None
    receives_before: int
    """Number of the program's receives that are posted before the action is launched, and before its send."""
    receives_before_send: int
    completes_chunk: bool
    """True if it computes the last gradient of its chunk in this iteration."""


@dataclass(frozen=True)
class Program:
    """Steps of one stage in an iteration."""

    schedule: Schedule
    stage: int
    steps: tuple[ProgramStep, ...]
    receives: dict[OrderedMessage, int]
    """Messages from other stages, with their positions in the order in which receives are posted, from 0. Each
    neighbour's messages keep the order in which it sends them.
    """
    reductions: Mapping[int, int] = field(default_factory=dict)
    """By chunk, the position of the step right before which the reduction of its gradients may start, where replicas
    run different plans; after the last step for chunks that are not named.
    """

    @property
    def completion(self) -> tuple[int, ...]:
        """Chunks in the order in which the plan completes their gradients."""
        return tuple(step.action.chunk for step in self.steps if step.completes_chunk)

    @property
    def completes_by_backwards(self) -> bool:
        """Return whether chunks complete in the order of their backwards, however weight gradients are interleaved."""
        kinds = {step.action.kind for step in self.steps}
        return self.schedule.chunks == 1 or Kind.BACKWARD_INPUT not in kinds


def compile_program(schedule: Schedule, stage: int, costs: Costs | None = None, *, sizes_known: bool = True) -> Program:
    """Compile the order of `stage`. The schedule must have passed `check_schedule`.

    `costs`: the costs that the schedule was planned for, which determine the launch order; they must be the same on
    every rank of the pipeline. None: all actions take equally long. `sizes_known`: whether receives can be posted
    before their messages arrive.
    """
    order, placement = schedule.orders[stage], schedule.placement
    last_gradient = _last_gradients(schedule, stage)
    ranks = launch_ranks(schedule, costs) if sizes_known else start_ranks(schedule, costs)
    postings = receives_before(schedule, stage, ranks) if sizes_known else receives_at_ends(schedule, stage, costs)
    messages: list[OrderedMessage] = []
    steps = []
    for index, (action, posting) in enumerate(zip(order, postings, strict=True)):
        messages += posting.before
        posted = len(messages)
        messages += posting.before_send
        step = ProgramStep(
            position=index,
            action=action,
            receive=needed(action, placement),
            send=produced(action, placement),
            receives_before=posted,
            receives_before_send=len(messages),
            completes_chunk=last_gradient.get(action.chunk) == index,
        )
        steps.append(step)
    receives = {message: place for place, message in enumerate(messages)}
    reductions = _reductions(schedule, stage, ranks) if last_gradient else {}
    return Program(schedule, stage, tuple(steps), receives, reductions)


def _last_gradients(schedule: Schedule, stage: int) -> dict[int, int]:
    """Return the position of the action that computes the last gradient of each chunk."""
    kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return {action.chunk: index for index, action in enumerate(schedule.orders[stage]) if action.kind in kinds}


def _reductions(schedule: Schedule, stage: int, ranks: LaunchRanks) -> dict[int, int]:
    """Return `Program.reductions` of a stage.

    A reduction is a collective of replicas, and has a place in the launch order of each (schedule.transfers.
    launch_order). These orders can be joined to one only if all have their reductions in the same order: that of chunks
    and stages in a backward. So a reduction comes before the first action of its stage that follows the chunk's last
    gradient and all earlier reductions; without such an action, it and all later ones come after everything else.
    """
    last = [_last_gradients(schedule, each) for each in range(schedule.stages)]
    found: dict[int, int] = {}
    at = -1
    for chunk in reversed(range(schedule.chunks)):
        for each in reversed(range(schedule.stages)):
            place = bisect.bisect_right(ranks[each], max(at, ranks[each][last[each][chunk]]))
            if place == len(ranks[each]):
                return found
            at = ranks[each][place]
            if each == stage:
                found[chunk] = place
    return found
