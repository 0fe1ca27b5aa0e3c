# SPDX-License-Identifier: Apache-2.0
"""Which message an action needs and which one it produces, in Megatron's interleaved placement."""

from __future__ import annotations

from typing import NamedTuple

from adaptra_megatron.schedule.actions import Action, Kind, Order, placement, virtual_stage


class Message(NamedTuple):
    """An activation (`gradient` False) or a gradient for `chunk` of the receiving stage."""

    source: int
    target: int
    gradient: bool
    chunk: int
    micro_batch: int


def produced(action: Action, stages: int, chunks: int) -> Message | None:
    """The message that leaves when `action` ends; None for weight gradients and at the ends of the model."""
    position = virtual_stage(action.stage, action.chunk, stages)
    if action.kind is Kind.FORWARD and position + 1 < stages * chunks:
        target, chunk = placement(position + 1, stages)
        return Message(action.stage, target, False, chunk, action.micro_batch)
    if action.kind.sends_gradient and position > 0:
        target, chunk = placement(position - 1, stages)
        return Message(action.stage, target, True, chunk, action.micro_batch)
    return None


def needed(action: Action, stages: int, chunks: int) -> Message | None:
    """The message that must have arrived before `action` starts; None where all it needs is at hand."""
    position = virtual_stage(action.stage, action.chunk, stages)
    if action.kind is Kind.FORWARD and position > 0:
        source, _chunk = placement(position - 1, stages)
        return Message(source, action.stage, False, action.chunk, action.micro_batch)
    if action.kind.sends_gradient and position + 1 < stages * chunks:
        source, _chunk = placement(position + 1, stages)
        return Message(source, action.stage, True, action.chunk, action.micro_batch)
    return None


def sent_to(order: Order, target: int, stages: int, chunks: int) -> list[Message]:
    """The messages that a stage running `order` sends to stage `target`, in the order in which they leave."""
    messages = (produced(action, stages, chunks) for action in order)
    return [message for message in messages if message is not None and message.target == target]
