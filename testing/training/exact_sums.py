# SPDX-License-Identifier: Apache-2.0
"""Make sums of gradients exact, so that they are bitwise equal in any order of micro-batches and ranks.

Float addition depends on its order, and a training that continues without a failed rank adds in another order. So each
micro-batch's gradient is rounded, before it is accumulated, to a multiple of `STEP`. As long as no sum needs more than
24 bits, each addition is exact. A training with failures then equals one without failures bit for bit, at any model
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

STEP, LARGEST = 2.0**-14, 4.0
"""Step and limit of gradients, in units of the number of replicas, by which DistributedDataParallel divides before
adding. A sum of 2 ** 24 * STEP / LARGEST = 256 micro-batches is exact."""


class ExactGradient(torch.Tensor):
    """Accumulated gradient of a parameter that rounds each added gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    step: float

    def add_(self, other: Any, *, alpha: Any = 1) -> torch.Tensor:
        """Add the gradient of one micro-batch."""
        assert alpha == 1
        return torch.Tensor.add_(self, self._rounded(other))

    def copy_(self, other: Any, non_blocking: bool = False) -> torch.Tensor:
        """Begin with the gradient of the first micro-batch, as kernels that add on the way do."""
        return torch.Tensor.copy_(self, self._rounded(other))

    def _rounded(self, gradient: torch.Tensor) -> torch.Tensor:
        steps = (gradient.to(self.dtype) / self.step).round_().clamp_(-LARGEST / STEP, LARGEST / STEP)
        return steps.mul_(self.step)


def make_sums_exact(model: Sequence[Any], replicas: int) -> None:
    """Round the gradients of `model`, chunks wrapped by DistributedDataParallel, so that 32-bit sums are exact.

    Raises ValueError for `replicas` whose multiples it does not divide exactly, such as 7: it multiplies by the
    rounded inverse.
    """
    if abs(float(torch.tensor(1.0 / replicas)) * replicas - 1.0) > 2.0**-25:
        raise ValueError(f"sums over {replicas} replicas are not exact in any order: take at most 6, or a power of two")
    for chunk in model:
        for parameter in chunk.parameters():
            assert parameter.main_grad.dtype == torch.float32
            gradient = parameter.main_grad.as_subclass(ExactGradient)
            gradient.step = STEP * replicas
            parameter.main_grad = gradient
