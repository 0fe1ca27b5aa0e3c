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

from adaptra_megatron.engine.routed_inputs import add_all_gradients, layers_with_a_first
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
        self.layer.weight.main_grad = torch.zeros_like(self.layer.weight)
        self.layer.weight.grad_added_to_main_grad = False

    def set_is_first_microbatch(self) -> None:
        self.layer.is_first_microbatch = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, is_first_microbatch=self.layer.is_first_microbatch)
        self.layer.is_first_microbatch = False
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
        config=None,
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
        if routed:
            add_all_gradients(layers_with_a_first(chunk))
        return Input(data, number, routed)

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
