# SPDX-License-Identifier: Apache-2.0
"""Compute the norm of the whole model's gradients without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from adaptra_megatron.transport.gpu.training_device import current_stream


class KnownNorm(float):
    """A norm that is equal on all ranks of the model."""


class PendingNorm:
    """A norm whose sum over the job is in progress. float(), comparisons and formatting wait for it.

    The wait ends once the other stages' gradients are ready. It is not collective: any rank may wait at any time.
    """

    def __init__(self, optimizer: Any) -> None:
        """Begin the sum. `optimizer`: Megatron's ChainedOptimizer, with gradients ready.

        Collective over the optimizer's group of gradient statistics. The other members take part by this or by stock's
        get_grad_norm_fp32, which has the same steps.
        """
        grads: list[torch.Tensor] = []
        for each in optimizer.chained_optimizers:
            grads += each.get_main_grads_for_grad_norm()
        if grads:
            overflow = torch.zeros(1, dtype=torch.int, device="cuda")
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [grads], False)
        else:
            norm = torch.zeros(1, dtype=torch.float, device="cuda")
        self._total: torch.Tensor = norm**2.0
        group = optimizer.get_grad_stats_parallel_group()
        self._work: Any = dist.all_reduce(self._total, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self._value: float | None = None

    @property
    def value(self) -> float:
        """Wait for the norm and return it. Raises torch.distributed's error if a rank of the group fails or is late."""
        if self._value is None:
            # On a stream of its own: what computes on the present one need not be over.
            stream = None if current_stream() is None else torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self._work.wait()
                self._value = float(self._total.item() ** 0.5)
        return self._value

    def __float__(self) -> float:
        return self.value

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def __str__(self) -> str:
        return str(self.value)

    def __lt__(self, other: float) -> bool:
        return self.value < other

    def __le__(self, other: float) -> bool:
        return self.value <= other

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __ge__(self, other: float) -> bool:
        return self.value >= other
