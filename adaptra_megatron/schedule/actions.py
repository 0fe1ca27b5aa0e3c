# SPDX-License-Identifier: Apache-2.0
"""The one representation of a pipeline schedule that planner, simulator, executor, CSV and trace share.

A *stage* is a pipeline rank, a *chunk* is one of its model chunks (virtual stages), and a *virtual stage*
`chunk * stages + stage` is the position in the model: virtual stage 0 holds the embedding, the last one the loss.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


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
        """Whether the action ends by sending an input gradient to the previous virtual stage."""
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


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One ordered tuple of actions per stage. Nothing is checked here: `checks.check_schedule` does that."""

    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[Order, ...]

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split in input and weight gradient."""
        return any(action.kind is Kind.BACKWARD_INPUT for order in self.orders for action in order)


def virtual_stage(stage: int, chunk: int, stages: int) -> int:
    """Position in the model of `chunk` on `stage` (Megatron's interleaved placement)."""
    return chunk * stages + stage


def placement(virtual: int, stages: int) -> tuple[int, int]:
    """`(stage, chunk)` of a virtual stage: the inverse of `virtual_stage`."""
    return virtual % stages, virtual // stages
