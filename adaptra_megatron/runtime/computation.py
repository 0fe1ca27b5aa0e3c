# SPDX-License-Identifier: Apache-2.0
"""The three things a stage computes, by Megatron's own forward_step and backward_step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.runtime.compat import backward_step
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.split_backward import DelayedGradient, WeightGradientQueue


class StageComputation(Protocol):
    """What the executor runs; emulation wraps these three methods."""

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """Output of the chunk (the loss on the last virtual stage); `input_tensor` is None on the first."""

    def backward(
        self,
        chunk: int,
        micro_batch: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_gradient: torch.Tensor | None,
        *,
        split: bool,
    ) -> torch.Tensor | None:
        """Gradient of the input (None on the first virtual stage); `split` leaves weight gradients for later."""

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        """Accumulate the weight gradients that the split backward of this micro-batch left."""


class MegatronComputation:
    """StageComputation for one iteration of a Megatron model."""

    def __init__(self, call: PipelineCall, queue: WeightGradientQueue) -> None:
        self.losses: list[Any] = []
        """What the loss functions returned, in forward order: stock's forward_data_store."""
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self._call = call
        self._queue = queue
        self._left: dict[tuple[int, int], list[DelayedGradient]] = {}

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        call = self._call
        output_tensor: torch.Tensor
        output_tensor, tokens = schedules.forward_step(
            call.forward_step_func,
            call.data_iterators[chunk],
            call.model_chunks[chunk],
            call.micro_batches,
            input_tensor,
            self.losses,
            call.config,
            cp_group_size=call.groups.cp.size(),
            collect_non_loss_data=call.collect_non_loss_data,
            checkpoint_activations_microbatch=None,
            is_first_microbatch=schedules.check_first_val_step(
                call.first_val_step, call.forward_only, micro_batch == 0
            ),
            current_microbatch=micro_batch,
            vp_stage=chunk if call.interleaved else None,
            is_last_stage=call.holds_last_stage and chunk == call.chunks - 1,
        )
        self.tokens += tokens
        return output_tensor

    def backward(
        self,
        chunk: int,
        micro_batch: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_gradient: torch.Tensor | None,
        *,
        split: bool,
    ) -> torch.Tensor | None:
        model, config = self._call.model_chunks[chunk], self._call.config
        if not split:
            return backward_step(model, input_tensor, output_tensor, output_gradient, config)
        with self._queue.collect() as left:
            input_gradient = backward_step(model, input_tensor, output_tensor, output_gradient, config)
        self._left[chunk, micro_batch] = left
        return input_gradient

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        self._queue.compute(self._left.pop((chunk, micro_batch)))
