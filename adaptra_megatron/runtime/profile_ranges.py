# SPDX-License-Identifier: Apache-2.0
"""Named ranges around what a stage computes, for torch.profiler (Kineto, HTA) and, on GPUs, Nsight Systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from adaptra_megatron.runtime.megatron.computation import StageComputation


class RangedComputation:
    """A StageComputation whose actions are ranges such as "adaptra F 3", or "adaptra I 3, chunk 1"."""

    def __init__(self, computation: StageComputation) -> None:
        self._computation = computation

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """See StageComputation."""
        with _range("F", chunk, micro_batch):
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
        """See StageComputation."""
        with _range("I" if split else "B", chunk, micro_batch):
            return self._computation.backward(
                chunk, micro_batch, input_tensor, output_tensor, output_gradient, split=split
            )

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        """See StageComputation."""
        with _range("W", chunk, micro_batch):
            self._computation.weight_gradient(chunk, micro_batch)


@contextlib.contextmanager
def _range(kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
    """A range that both kinds of profilers show. torch's own ranges reach Nsight within emit_nvtx() alone."""
    name = f"adaptra {kind} {micro_batch}{f', chunk {chunk}' if chunk else ''}"
    with contextlib.ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield
