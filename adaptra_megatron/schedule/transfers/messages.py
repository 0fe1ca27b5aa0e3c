# SPDX-License-Identifier: Apache-2.0
"""Which message an action needs and which one it produces, and between which stages: looked up in the placement."""

from __future__ import annotations

from typing import NamedTuple

from adaptra_megatron.schedule.actions import Action, Kind, Order
from adaptra_megatron.schedule.placement import Placement


class Message(NamedTuple):
    """An activation (`gradient` False) or a gradient for `chunk` of the receiving stage.

    `source` and `target` are one stage where two virtual stages that follow each other are: nothing is sent then.
    """

    source: int
    target: int
    gradient: bool
    chunk: int
    micro_batch: int


def produced(action: Action, placement: Placement) -> Message | None:
    """The message that leaves when `action` ends; None for weight gradients and at the ends of the model."""
    stage, kind, chunk, micro_batch = action
    if kind is Kind.BACKWARD_WEIGHT:
        return None
    gradient = kind is not Kind.FORWARD
    receiver = (placement.previous_place if gradient else placement.next_place)(stage, chunk)
    return None if receiver is None else Message(stage, receiver.stage, gradient, receiver.chunk, micro_batch)


def needed(action: Action, placement: Placement) -> Message | None:
    """The message that must have arrived before `action` starts; None where all it needs is at hand."""
    stage, kind, chunk, micro_batch = action
    if kind is Kind.BACKWARD_WEIGHT:
        return None
    gradient = kind is not Kind.FORWARD
    sender = (placement.next_place if gradient else placement.previous_place)(stage, chunk)
    return None if sender is None else Message(sender.stage, stage, gradient, chunk, micro_batch)


def sent_to(order: Order, target: int, placement: Placement) -> list[Message]:
    """The messages that a stage running `order` sends to stage `target`, in the order in which they leave."""
    messages = (produced(action, placement) for action in order)
    return [message for message in messages if message is not None and message.target == target]
