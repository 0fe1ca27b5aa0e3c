# SPDX-License-Identifier: Apache-2.0
"""Ranges around actions, as torch.profiler shows them."""

from __future__ import annotations

import pytest
import torch

from adaptra_megatron.runtime.profile_ranges import RangedComputation


class Computation:
    """Doubles what it is given; the backward of micro-batch 9 fails."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        assert input_tensor is not None
        return 2 * input_tensor

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
        if micro_batch == 9:
            raise RuntimeError("out of memory")
        self.called.append((chunk, micro_batch, input_tensor, output_tensor, output_gradient, split))
        return output_gradient

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        self.called.append((chunk, micro_batch))


def test_actions_are_ranges_and_do_what_they_did() -> None:
    computation = Computation()
    ranged = RangedComputation(computation)
    one = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(ranged.forward(0, 3, one), 2 * one)
        assert ranged.backward(1, 3, None, one, one, split=True) is one
        assert ranged.backward(0, 4, None, one, None, split=False) is None
        ranged.weight_gradient(1, 3)
        with pytest.raises(RuntimeError, match="out of memory"):
            ranged.backward(0, 9, None, one, None, split=False)
    assert computation.called == [(1, 3, None, one, one, True), (0, 4, None, one, None, False), (1, 3)]
    names = [event.name for event in profile.events() if event.name.startswith("adaptra")]
    assert names == ["adaptra F 3", "adaptra I 3, chunk 1", "adaptra B 4", "adaptra W 3, chunk 1", "adaptra B 9"]
