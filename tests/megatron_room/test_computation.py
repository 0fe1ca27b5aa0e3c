# SPDX-License-Identifier: Apache-2.0
"""Gradients of micro-batches that are added in another order than their forwards ran in, over a stand-in of Transformer
Engine, which overwrites a main gradient with that of the first micro-batch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from support import stand_in_te
from torch.utils.checkpoint import checkpoint

from adaptra_megatron.engine.routed_inputs import set_cast_anew
from adaptra_megatron.megatron.computation import Input, MegatronComputation
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

WIDTH, ROWS, MICRO_BATCHES = 8, 6, 3


class Chunk(torch.nn.Module):
    """A layer as Megatron wraps it: TELinear.forward, and MegatronModule.set_is_first_microbatch with FP8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        linear = sys.modules["transformer_engine.pytorch"].Linear
        self.layer = linear(in_features=WIDTH, out_features=WIDTH, bias=False, fuse_wgrad_accumulation=True)
        self.layer.is_first_microbatch = False  # as an iteration leaves it
        self.layer.disable_parameter_transpose_cache = False
        self.layer.weight.main_grad = torch.zeros_like(self.layer.weight)
        self.layer.weight.grad_added_to_main_grad = False

    def set_is_first_microbatch(self) -> None:
        self.layer.is_first_microbatch = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        first = None if layer.disable_parameter_transpose_cache else layer.is_first_microbatch
        output: torch.Tensor = layer(hidden, is_first_microbatch=first)
        layer.is_first_microbatch = False
        return output


def main_gradient(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], *, routed: bool) -> torch.Tensor:
    """Run all forwards in order, then backwards in `order`; return the main gradient."""
    for name, module in stand_in_te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def forward_step(_step: Any, data: Any, chunk: Chunk, *_: Any, is_first_microbatch: bool, **__: Any) -> Any:
        if is_first_microbatch:
            chunk.set_is_first_microbatch()
        return chunk(next(data)), 0

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    chunk, drawn = Chunk(), torch.Generator().manual_seed(2)
    data = iter([torch.randn(ROWS, WIDTH, generator=drawn, requires_grad=True) for _ in range(MICRO_BATCHES)])
    call: Any = SimpleNamespace(
        model_chunks=[chunk],
        micro_batches=MICRO_BATCHES,
        config=SimpleNamespace(disable_parameter_transpose_cache=False),
        groups=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        collect_non_loss_data=False,
        interleaved=False,
        stage=0,
        last_place=(1, 0),
        forward_step_func=None,
        first_val_step=None,
        forward_only=False,
    )

    def inputs(_chunk: int, number: int) -> Input:
        return Input(data, number, routed)

    set_cast_anew(call, routed)
    computation = MegatronComputation(call, WeightGradientQueue(layers), inputs)
    outputs = [computation.forward(0, micro_batch, None) for micro_batch in range(MICRO_BATCHES)]
    for micro_batch in order:
        outputs[micro_batch].square().sum().backward()
    gradient: torch.Tensor = chunk.layer.weight.main_grad
    return gradient


def test_no_gradient_of_routed_micro_batches_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = main_gradient(monkeypatch, (0, 1, 2), routed=False)
    assert torch.equal(main_gradient(monkeypatch, (0, 1, 2), routed=True), expected)
    torch.testing.assert_close(main_gradient(monkeypatch, (1, 2, 0), routed=True), expected)
    lost = main_gradient(monkeypatch, (1, 2, 0), routed=False)
    assert not torch.allclose(lost, expected), "a first micro-batch that is not the first to be added overwrites"


class CastingLayer(torch.nn.Module):
    """Casts its weight as Transformer Engine's Linear does to FP8 (`get_weight_workspace`), in Megatron's wrapper.
    Backward computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self._cast = torch.zeros(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self._forward, hidden, use_reentrant=True)
        return output

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.is_first_microbatch = False
        if first:
            self._cast = self.weight.detach().clone()
        cast = self.weight.detach() if first is None else self._cast
        return Scaled.apply(hidden, cast)  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """A product with a weight that has been cast."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def test_routed_forwards_that_are_computed_again_use_the_present_weights() -> None:
    layer, given = CastingLayer(), torch.ones(WIDTH, requires_grad=True)
    call: Any = SimpleNamespace(model_chunks=[layer], config=SimpleNamespace(disable_parameter_transpose_cache=False))

    def gradient() -> list[float]:
        given.grad = None
        layer(given).sum().backward()
        assert given.grad is not None
        found: list[float] = given.grad.tolist()
        return found

    assert gradient() == [1.0] * WIDTH
    layer.weight.data.fill_(2.0)
    assert gradient() == [1.0] * WIDTH, "no micro-batch is the first of a routed iteration"
    set_cast_anew(call, True)
    assert gradient() == [2.0] * WIDTH
    layer.weight.data.fill_(3.0)
    set_cast_anew(call, False)
    layer.is_first_microbatch = True  # as stock sets it
    assert gradient() == [3.0] * WIDTH
