# SPDX-License-Identifier: Apache-2.0
"""The one representation of a pipeline schedule that planner, simulator, executor, CSV and trace share.

A *stage* is a pipeline rank, a *chunk* is one of its model chunks, and a *virtual stage* is a position in the model:
virtual stage 0 holds the embedding, the last one the loss. Which stage and chunk a virtual stage is, the schedule's
placement says; in Megatron's, chunk c of stage s is virtual stage `c * stages + s`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.schedule.placement import Placement, interleaved


class Kind(str, enum.Enum):
    """What an action computes. The letters are those of torch.distributed.pipelining's CSV."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input and weight gradients in one go."""
    BACKWARD_INPUT = "I"
    """The input gradient alone; a BACKWARD_WEIGHT of the same micro-batch and chunk must follow."""
    BACKWARD_WEIGHT = "W"
    """The weight gradient that a BACKWARD_INPUT left."""

    def __str__(self) -> str:
        return self.value

    @property
    def sends_gradient(self) -> bool:
        """Return whether the action ends by sending an input gradient to the previous virtual stage."""
        return self is Kind.BACKWARD or self is Kind.BACKWARD_INPUT


class Action(NamedTuple):
    """One unit of work of one stage."""

    stage: int
    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"stage {self.stage} {self.kind.value}(micro-batch {self.micro_batch}, chunk {self.chunk})"


Order = tuple[Action, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """One ordered tuple of actions per stage. Nothing is checked here: `checks.check_schedule` does that."""

    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[Order, ...]
    custom_placement: Placement | None = None
    """None: Megatron's, which is also what Megatron's own table becomes."""

    def __post_init__(self) -> None:
        if self.custom_placement is not None and self.custom_placement == interleaved(self.stages, self.chunks):
            object.__setattr__(self, "custom_placement", None)

    def __repr__(self) -> str:
        return f"<Schedule: {self.stages} stages x {self.chunks} chunks, {self.micro_batches} micro-batches>"

    @property
    def placement(self) -> Placement:
        """Which stage runs each virtual stage, and so where each message goes."""
        return self.custom_placement or interleaved(self.stages, self.chunks)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Return whether any backward is split in input and weight gradient."""
        return any(action.kind is Kind.BACKWARD_INPUT for order in self.orders for action in order)
