# SPDX-License-Identifier: Apache-2.0
"""Compile a stage's order of actions, once per plan, into steps for the executor."""

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
    """Position in the plan's order of its stage."""
    action: Action
    receive: OrderedMessage | None
    send: OrderedMessage | None
    receives_before: int
    """Number of the program's receives that are posted before the action is launched, and before its message
    is sent.
    """
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
