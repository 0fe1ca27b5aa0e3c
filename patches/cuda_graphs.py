# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.core.transformer.cuda_graphs, for layers that Transformer Engine captures as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import CAPTURE_SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.megatron.captured_layers import CapturedLayers, LayerOrder

_MODULE = "megatron.core.transformer.cuda_graphs"


def _layers(runtime: AdaptraRuntime) -> CapturedLayers:
    from adaptra_megatron.engine.features import LayerCapture

    return runtime.feature(LayerCapture).layers


def _order(stock: Callable[..., list[int]], runtime: AdaptraRuntime) -> Callable[..., list[int]]:
    @functools.wraps(stock)
    def convert_schedule_table_to_order(*given: Any, **keywords: Any) -> list[int]:
        # Stock's order is always made: a plan's is taken only if it has the same actions.
        return _layers(runtime).order_for(stock(*given, **keywords))

    return convert_schedule_table_to_order


def _layer_order(stock: Callable[..., LayerOrder], runtime: AdaptraRuntime) -> Callable[..., LayerOrder]:
    @functools.wraps(stock)
    def get_overlap_moe_expert_parallel_comm_order(
        order: list[int], num_layers_per_chunk: list[int], capture_wgrad_graph: bool
    ) -> LayerOrder:
        given = order, num_layers_per_chunk, capture_wgrad_graph
        # Stock's is made on demand: it pairs all between the first backward and the last forward, as 1F1B has them.
        return _layers(runtime).layers_for(lambda: stock(*given), *given[1:])

    return get_overlap_moe_expert_parallel_comm_order


def _capture(stock: Callable[..., None], runtime: AdaptraRuntime) -> Callable[..., None]:
    @functools.wraps(stock)
    def create_cudagraphs(self: Any) -> None:
        _layers(runtime).capture(self, stock)

    return create_cudagraphs


CAPTURE_PATCHES = (
    Patch(
        identity="graph-order",
        target=f"{_MODULE}:convert_schedule_table_to_order",
        versions=CAPTURE_SUPPORTED,
        parameters=("num_warmup_microbatches", "num_model_chunks", "schedule_table"),
        reason="has CUDA graphs of layers captured in the order of the plan that runs",
        replace=_order,
    ),
    Patch(
        identity="graph-layer-order",
        target=f"{_MODULE}:get_overlap_moe_expert_parallel_comm_order",
        versions=CAPTURE_SUPPORTED,
        parameters=("order", "num_layers_per_chunk", "capture_wgrad_graph"),
        reason="has layers of combined actions captured as they alternate in the plan that runs",
        replace=_layer_order,
    ),
    Patch(
        identity="graph-capture",
        target=f"{_MODULE}:TECudaGraphHelper.create_cudagraphs",
        versions=CAPTURE_SUPPORTED,
        parameters=("self",),
        reason="knows the graphs that there are, to have them captured anew for another plan",
        replace=_capture,
    ),
)
