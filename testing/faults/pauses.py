# SPDX-License-Identifier: Apache-2.0
"""Make stages pause for a moment, as in a garbage collection or while a checkpoint is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from testing.faults.network.link_story import Pause

if TYPE_CHECKING:
    from adaptra_megatron.megatron.computation import ForwardPart, StageComputation


class Pauses:
    """Pauses of one stage. The training reports each iteration and decorates its computation."""

    def __init__(self, pauses: Sequence[Pause], stage: int) -> None:
        self._pauses = [pause for pause in pauses if pause.stage == stage]
        self._iteration = 0
        self.made = 0
        """Number of pauses so far."""

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0), after the pauses before it."""
        self._iteration = iteration
        self._pause(None)

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Return `computation` with pauses in its forwards."""
        return _PausingComputation(computation, self)

    def forward(self, micro_batch: int) -> None:
        """Begin a forward of `micro_batch`, after its pause."""
        self._pause(micro_batch)

    def _pause(self, micro_batch: int | None) -> None:
        for pause in self._pauses:
            if (pause.iteration, pause.micro_batch) == (self._iteration, micro_batch):
                time.sleep(pause.seconds)
                self.made += 1


class _PausingComputation:
    """A StageComputation that pauses in its forwards."""

    def __init__(self, computation: StageComputation, pauses: Pauses) -> None:
        self._forward, self._pauses = computation.forward, pauses
        self.backward, self.weight_gradient = computation.backward, computation.weight_gradient
        self._forward_backward = computation.forward_backward

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        self._pauses.forward(micro_batch)
        return self._forward(chunk, micro_batch, input_tensor)

    def forward_backward(self, forward: ForwardPart, *others: Any) -> torch.Tensor:
        self._pauses.forward(forward.micro_batch)
        return self._forward_backward(forward, *others)
