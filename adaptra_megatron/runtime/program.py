# SPDX-License-Identifier: Apache-2.0
"""One stage's order of actions, compiled once per plan into what the executor does step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.actions import Action, Kind, Schedule
from adaptra_megatron.schedule.routing import Message, needed, produced, sent_to
from adaptra_megatron.transport.messages import Direction, MessageKey


@dataclass(frozen=True, slots=True)
class Step:
    """One action with its messages."""

    position: int
    """In the plan's order of its stage."""
    action: Action
    receive: Message | None
    send: Message | None
    completes_chunk: bool
    """Whether it computes the last gradient of its chunk in this iteration."""


@dataclass(frozen=True)
class Program:
    """What one stage does in an iteration."""

    schedule: Schedule
    stage: int
    steps: tuple[Step, ...]
    expected: dict[int, tuple[Message, ...]]
    """Messages from each neighbour, in the order in which it sends them."""

    @property
    def completion(self) -> tuple[int, ...]:
        """Chunks in the order in which the plan completes their gradients."""
        return tuple(step.action.chunk for step in self.steps if step.completes_chunk)

    @property
    def completes_by_backwards(self) -> bool:
        """Whether chunks are complete in the order of their backwards however these and weight gradients mix."""
        kinds = {step.action.kind for step in self.steps}
        return self.schedule.chunks == 1 or Kind.BACKWARD_INPUT not in kinds


def compile_program(schedule: Schedule, stage: int) -> Program:
    """Compile the order of `stage`. The schedule must have passed `check_schedule`."""
    stages, chunks = schedule.stages, schedule.chunks
    order = schedule.orders[stage]
    last_gradient = {
        action.chunk: index
        for index, action in enumerate(order)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    }
    steps = tuple(
        Step(
            position=index,
            action=action,
            receive=needed(action, stages, chunks),
            send=produced(action, stages, chunks),
            completes_chunk=last_gradient.get(action.chunk) == index,
        )
        for index, action in enumerate(order)
    )
    neighbours = {(stage - 1) % stages, (stage + 1) % stages} - {stage}
    expected = {peer: tuple(sent_to(schedule.orders[peer], stage, stages, chunks)) for peer in sorted(neighbours)}
    return Program(schedule, stage, steps, expected)


def message_key(message: Message, iteration: int) -> MessageKey:
    direction = Direction.GRADIENT if message.gradient else Direction.ACTIVATION
    return MessageKey(iteration, direction, message.chunk, message.micro_batch)


class ReceiveWindow:
    """Which of a neighbour's messages to post receives for: a few ahead of what has been consumed."""

    def __init__(self, expected: Sequence[Message], lookahead: int) -> None:
        self._expected = expected
        self._lookahead = lookahead
        self._posted = 0
        self._consumed = 0
        self._position = {message: index for index, message in enumerate(expected)}

    def open_until(self, message: Message | None) -> Sequence[Message]:
        """Messages to post now, in order; `message` (if given) is always posted when this returns."""
        target = self._consumed + self._lookahead
        if message is not None:
            target = max(target, self._position[message] + 1)
        first, self._posted = self._posted, max(self._posted, min(target, len(self._expected)))
        return self._expected[first : self._posted]

    def consume(self) -> None:
        self._consumed += 1
