# SPDX-License-Identifier: Apache-2.0
"""Compute the actions of models with combined 1F1B (--overlap-moe-expert-parallel-comm) by Megatron's own
combined_forward_backward_step.

It takes a forward, a backward or both, and runs them layer by layer: experts' all-to-alls of one are hidden behind
computation of the other. The forward makes a plan of its layers' parts, by which its backward runs, so each of the two
may run alone or combined with any other (megatron/core/pipeline_parallel/combined_1f1b.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptra_megatron.megatron.compat import combined_step
from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, MegatronComputation, Send
from adaptra_megatron.megatron.gradients.linear_wgrad import Gradients, WeightGradientQueue


class CombinedComputation(MegatronComputation):
    """StageComputation for one training iteration of a Megatron model with combined 1F1B."""

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        output, _ = self._step(forward=ForwardPart(chunk, micro_batch, input_tensor))
        assert output is not None
        return output

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
        part = BackwardPart(chunk, micro_batch, input_tensor, output_tensor, output_gradient, split)
        _, input_gradient = self._run(part, lambda: self._step(backward=part))
        return input_gradient

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        output, _ = self._run(
            backward,
            lambda: self._step(
                forward=forward,
                backward=backward,
                post_forward=lambda tensor, _chunk: send_output(tensor),
                post_backward=lambda tensor, _chunk: send_gradient(tensor),
            ),
        )
        assert output is not None
        return output

    def _run(self, backward: BackwardPart, step: Callable[[], _Computed]) -> _Computed:
        """Run a `step` with `backward`; keep the weight gradients that a split one leaves."""
        if not backward.split:
            return step()
        _leave_delayed_gradients(backward.output_tensor, self._queue)
        with self._queue.collect() as left:
            computed = step()
        self._left[backward.chunk, backward.micro_batch] = left
        return computed

    def _step(
        self, *, forward: ForwardPart | None = None, backward: BackwardPart | None = None, **hooks: Any
    ) -> _Computed:
        """Return the output of `forward` and the gradient of the input of `backward`."""
        call = self._call
        of_forward: dict[str, Any] = {}
        iterator = None
        if forward is not None:
            iterator, number, routed = self._inputs(forward.chunk, forward.micro_batch)
            of_forward = {
                "f_model_chunk_id": forward.chunk,
                "is_first_microbatch": not routed and self._is_first(forward.chunk),
                "current_microbatch": number,
                "collect_non_loss_data": call.collect_non_loss_data,
            }
        output: torch.Tensor | None
        input_gradient: torch.Tensor | None
        output, tokens, input_gradient = combined_step(
            call.config,
            self._forward_step_func,
            iterator,
            None if forward is None else call.model_chunks[forward.chunk],
            call.micro_batches,
            None if forward is None else forward.input_tensor,
            self.losses,
            *((None,) * 4 if backward is None else self._of_backward(backward)),
            call.config,
            **of_forward,
            **hooks,
        )
        if forward is not None:
            self.tokens += tokens
        return output, input_gradient

    def _of_backward(self, backward: BackwardPart) -> tuple[Any, ...]:
        return (
            self._call.model_chunks[backward.chunk],
            backward.input_tensor,
            backward.output_tensor,
            backward.output_gradient,
        )


_Computed = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(eq=False)
class PartWeightGradients:
    """The weight gradients of one part of a layer for one micro-batch that --delay-wgrad-compute delays."""

    part: Any
    """Megatron's TransformerLayerNode."""
    graph_task: int = 0

    @property
    def owner(self) -> object:
        return self

    def compute(self) -> Gradients:
        """See DelayedGradient. Layers keep what they delay in queues of their own, first in, first out."""
        del self.part.backward_dw
        self.part.backward_dw()
        return []


def _leave_delayed_gradients(output_tensor: Any, queue: WeightGradientQueue) -> None:
    """Have the backward of `output_tensor` leave to `queue` what --delay-wgrad-compute would compute at its end."""
    plan = output_tensor.schedule_plan
    for layer in map(plan.get_layer, range(plan.num_layers())):
        captured = getattr(getattr(layer.layer, "transformer_layer", layer.layer), "cuda_graphs", None)
        for part in vars(layer).values():
            # The rest of a captured layer may compute them from memory of graphs, or in a graph.
            if getattr(part, "delay_wgrad_compute", False) and (part is layer.mlp or not captured):
                part.backward_dw = functools.partial(queue.add, PartWeightGradients(part))
