# SPDX-License-Identifier: Apache-2.0
"""Layers for `pretrain_gpt.py --spec support.spread_layers two_layers`, with what Megatron's local ones lack.

That is sequence parallelism of norms, which apex has, and context parallelism of attention, which is Transformer
Engine's.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from testing.training.context_parallel import GatheringAttention
from testing.training.model import TorchNorm

_layer = get_gpt_layer_local_spec()
_layer.submodules.input_layernorm = _layer.submodules.pre_mlp_layernorm = TorchNorm
_layer.submodules.self_attention.submodules.core_attention = GatheringAttention

two_layers = TransformerBlockSubmodules(layer_specs=[_layer] * 2, layer_norm=TorchNorm)
"""Submodules of a stage with two layers."""
