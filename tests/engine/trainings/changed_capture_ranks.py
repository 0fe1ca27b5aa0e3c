# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` with a change of captured layers: `changed_capture_ranks.py CHANGE REQUEST REPORT`.

CHANGE: `stale`, layers are not captured anew for another order; `lent`, what is kept for longer is not copied;
`offloads`, experts are offloaded, as Megatron does it in layers of Transformer Engine alone; and in all cases a switch
counts nothing; or a number, the seconds that a capture counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install
from testing.replacing import Replaced, Replacement

if TYPE_CHECKING:
    from adaptra_megatron.megatron.captured_layers import Order


def _stale(layers: Any, order: Order, *, warm: bool) -> bool:
    layers._order = order
    return False


def _offloading(stock: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Interface,
    )

    def forward(self: Any, hidden: torch.Tensor, *given: Any) -> tuple[torch.Tensor, Any]:
        if not self.config.fine_grained_activation_offloading:
            return stock(self, hidden, *given)
        with Interface(True, hidden, "expert_fc1") as hidden:
            output, bias = stock(self, hidden, *given)
        return Interface.group_commit(output, "expert_fc1", [hidden]), bias

    return forward


def changes(name: str) -> list[Replacement]:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from adaptra_megatron.megatron.captured_layers import CapturedLayers
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

    parts = {
        "offloads": Replacement(SequentialMLP, "forward", _offloading(SequentialMLP.forward), "experts of no GPU"),
        "stale": Replacement(CapturedLayers, "follow", _stale, "graphs keep their order"),
        "lent": Replacement(WeightGradientQueue, "owned", lambda queue, tensor: tensor, "it stays in graphs' memory"),
    }
    counted_s = 0.0 if name in parts else float(name)
    seconds = property(lambda layers: counted_s, lambda layers, value: None)
    return [
        *(part for key, part in parts.items() if key == name),
        Replacement(CapturedLayers, "seconds", seconds, "machines differ", may_be_absent=True),
    ]


if __name__ == "__main__":
    install(with_fused_weight_gradient=True)
    with Replaced(changes(sys.argv[1])):
        variants._main(sys.argv[2:])
