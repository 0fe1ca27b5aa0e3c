# SPDX-License-Identifier: Apache-2.0
"""Compute F, I and W of a stage by Megatron's own forward_step and backward_step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.elastic.failure_errors import of_script, owned
from adaptra_megatron.megatron.compat import backward_step
from adaptra_megatron.megatron.gradients.linear_wgrad import DelayedGradient, WeightGradientQueue
from adaptra_megatron.megatron.megatron_call import PipelineCall


class ForwardPart(NamedTuple):
    """The forward of a combined action."""

    chunk: int
    micro_batch: int
    input_tensor: torch.Tensor | None
    """None on the first virtual stage."""


class BackwardPart(NamedTuple):
    """The backward of a combined action."""

    chunk: int
    micro_batch: int
    input_tensor: torch.Tensor | None
    output_tensor: torch.Tensor
    output_gradient: torch.Tensor | None
    split: bool
    """Whether weight gradients are left for later."""


Send = Callable[[torch.Tensor], None]


class StageComputation(Protocol):
    """Interface of the computation that the executor runs; emulation wraps these four methods."""

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the output of the chunk; on the last virtual stage, the loss. `input_tensor` is None on the first
        stage.
        """

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
        """Return the gradient of the input; None on the first virtual stage. `split`: leave weight gradients
        for later.
        """

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        """Accumulate the weight gradients that the split backward of this micro-batch left."""

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        """Compute a forward and a backward as one, layer by layer; return the output of the forward.

        `send_output`, `send_gradient`: called with the output of the forward's layers and with the gradient of the
        backward's input as soon as these have been launched, in this order.
        """


class SurroundedComputation:
    """StageComputation whose actions each run within a context.

    The context is created from the action's kind ("F", "B", "I" or "W"), chunk and micro-batch.
    """

    def __init__(
        self, computation: StageComputation, around: Callable[[str, int, int], AbstractContextManager[object]]
    ) -> None:
        self._computation, self._around = computation, around

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        with self._around("F", chunk, micro_batch):
            return self._computation.forward(chunk, micro_batch, input_tensor)

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
        tensors = (input_tensor, output_tensor, output_gradient)
        with self._around("I" if split else "B", chunk, micro_batch):
            return self._computation.backward(chunk, micro_batch, *tensors, split=split)

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        with self._around("W", chunk, micro_batch):
            self._computation.weight_gradient(chunk, micro_batch)

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        """See StageComputation. Runs within the contexts of both actions."""
        with (
            self._around("F", forward.chunk, forward.micro_batch),
            self._around("I" if backward.split else "B", backward.chunk, backward.micro_batch),
        ):
            return self._computation.forward_backward(forward, backward, send_output, send_gradient)


class Input(NamedTuple):
    """Input of Megatron's forward_step for a micro-batch, besides the activation of another stage."""

    iterator: Iterator[Any] | None
    """Iterator whose next item is the micro-batch's data."""
    number: int
    """Within its replica's iteration."""
    routed: bool = False
    """Whether micro-batches of other replicas may run here. Gradients are then added in any order: no micro-batch is
    taken for the first."""


def stock_inputs(call: PipelineCall) -> Callable[[int, int], Input]:
    """Return stock's inputs: for each chunk, the call's own iterator in order."""
    return lambda chunk, micro_batch: Input(call.data_iterators[chunk], micro_batch)


class MegatronComputation:
    """StageComputation for one iteration of a Megatron model without combined 1F1B, or of an evaluation."""

    def __init__(
        self,
        call: PipelineCall,
        queue: WeightGradientQueue,
        inputs: Callable[[int, int], Input],
    ) -> None:
        """`inputs`: called before each forward, with chunk and micro-batch."""
        self.losses: list[Any] = []
        """Results of the loss functions in forward order: stock's forward_data_store."""
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self._call = call
        self._forward_step_func = _owned_forward_step(call.forward_step_func)
        self._queue = queue
        self._left: dict[tuple[int, int], list[DelayedGradient]] = {}
        self._inputs = inputs
        self._begun: set[int] = set()
        """Chunks that have run a forward."""

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        call = self._call
        iterator, number, routed = self._inputs(chunk, micro_batch)
        output_tensor: torch.Tensor
        output_tensor, tokens = schedules.forward_step(
            self._forward_step_func,
            iterator,
            call.model_chunks[chunk],
            call.micro_batches,
            input_tensor,
            self.losses,
            call.config,
            cp_group_size=call.groups.cp.size(),
            collect_non_loss_data=call.collect_non_loss_data,
            # Stock sets it for num_microbatches_with_partial_activation_checkpoints, which is refused.
            checkpoint_activations_microbatch=None,
            is_first_microbatch=not routed and self._is_first(chunk),
            current_microbatch=number,
            vp_stage=chunk if call.interleaved else None,
            is_last_stage=(call.stage, chunk) == call.last_place,
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

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        raise AssertionError("a combined action is only for models with --overlap-moe-expert-parallel-comm")

    def _is_first(self, chunk: int) -> bool:
        """Return what stock's forward_step gets as `is_first_microbatch`. Call it once per forward.

        Of the chunk, in the order that it runs: Transformer Engine casts weights to FP8 at the first forward.
        """
        first = chunk not in self._begun
        self._begun.add(chunk)
        return bool(schedules.check_first_val_step(self._call.first_val_step, self._call.forward_only, first))


def _owned_forward_step(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Wrap the training script's forward_step and its loss functions, so that their errors count as the
    script's own.
    """

    def forward_step(*given: Any, **keywords: Any) -> tuple[Any, Any]:
        with of_script():
            output, loss_function = function(*given, **keywords)
        return output, None if loss_function is None else owned(loss_function)

    return forward_step
