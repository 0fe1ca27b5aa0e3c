# SPDX-License-Identifier: Apache-2.0
"""One stage's order of actions, compiled once per plan into what the executor does step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.transfers.launch_order import (
    OrderedMessage,
    Posting,
    launch_ranks,
    needed,
    produced,
    receives_at_ends,
    receives_before,
)


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One action with its messages."""

    position: int
    """In the plan's order of its stage."""
    action: Action
    receive: OrderedMessage | None
    send: OrderedMessage | None
    receives_before: int
    """How many of the program's receives are posted before it is launched, and before its message is sent."""
    receives_before_send: int
    completes_chunk: bool
    """Set if it computes the last gradient of its chunk in this iteration."""


@dataclass(frozen=True)
class Program:
    """Steps of one stage in an iteration."""

    schedule: Schedule
    stage: int
    steps: tuple[ProgramStep, ...]
    receives: dict[OrderedMessage, int]
    """Messages from other stages and their places, from 0, in the order in which their receives are posted. In it, each
    neighbour's messages keep the order in which it sends them."""

    @property
    def completion(self) -> tuple[int, ...]:
        """Chunks in the order in which the plan completes their gradients."""
        return tuple(step.action.chunk for step in self.steps if step.completes_chunk)

    @property
    def completes_by_backwards(self) -> bool:
        """Return whether chunks are complete in the order of their backwards however these and weight gradients mix."""
        kinds = {step.action.kind for step in self.steps}
        return self.schedule.chunks == 1 or Kind.BACKWARD_INPUT not in kinds


def compile_program(schedule: Schedule, stage: int, costs: Costs | None = None, *, sizes_known: bool = True) -> Program:
    """Compile the order of `stage`. The schedule must have passed `check_schedule`.

    `costs`: what the schedule was planned for, the same on every rank of the pipeline, for they tell the launch order;
    None: all actions take equally long. `sizes_known`: whether receives can be posted before their messages are there.
    """
    order, placement = schedule.orders[stage], schedule.placement
    last_gradient = {
        action.chunk: index
        for index, action in enumerate(order)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    }
    messages: list[OrderedMessage] = []
    steps = []
    for index, (action, posting) in enumerate(zip(order, _postings(schedule, stage, costs, sizes_known), strict=True)):
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
    return Program(schedule, stage, tuple(steps), {message: place for place, message in enumerate(messages)})


def _postings(schedule: Schedule, stage: int, costs: Costs | None, sizes_known: bool) -> Sequence[Posting]:
    if not sizes_known:
        return receives_at_ends(schedule, stage, costs)
    return [Posting(before, ()) for before in receives_before(schedule, stage, launch_ranks(schedule, costs))]
