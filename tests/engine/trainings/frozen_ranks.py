# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` whose models are not trained as a whole: `frozen_ranks.py WHAT VARIANTS.json
REPORT.json`. WHAT: "adapters" trains adapters of each linear layer alone, as LoRA does; "stage" freezes the first
chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install

RANK = 4
"""Of the product of an adapter's two weights."""


def with_adapters(chunk: Any) -> Any:
    """`chunk`, frozen, with adapters of Megatron's own layers next to the linear layers of its transformer layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    class Adapted(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            config, parallel = layer.config, {"init_method": layer.config.init_method, "bias": False}
            self.layer = layer
            self.down = ColumnParallelLinear(layer.input_size, RANK, config=config, **parallel)
            row = {"input_is_parallel": True, "skip_bias_add": False}
            self.up = RowParallelLinear(RANK, layer.output_size, config=config, **row, **parallel)

        def forward(self, layer_input: torch.Tensor) -> tuple[torch.Tensor, Any]:
            output, bias = self.layer(layer_input)
            return output + self.up(self.down(layer_input)[0])[0], bias

    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        for part, names in (
            (layer.self_attention, ("linear_qkv", "linear_proj")),
            (layer.mlp, ("linear_fc1", "linear_fc2")),
        ):
            for name in names:
                setattr(part, name, Adapted(getattr(part, name)))
    return chunk


def frozen_if_first(chunk: Any) -> Any:
    return chunk.requires_grad_(not chunk.pre_process)


def main() -> None:
    install(with_fused_weight_gradient=True)
    from testing.training import model

    build: Callable[..., Any] = model._build_chunk
    change = {"adapters": with_adapters, "stage": frozen_if_first}[sys.argv[1]]
    model._build_chunk = lambda *arguments: change(build(*arguments))
    variants._main(sys.argv[2:])


if __name__ == "__main__":
    main()
