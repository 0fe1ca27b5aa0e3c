# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron's distributed optimizers, for training that survives rank failures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _with_copies(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance
    from adaptra_megatron.megatron.state.shard_copies import with_copies

    # A subclass, since Megatron tests its optimizers by isinstance.
    replacement: Callable[..., Any] = with_copies(stock, runtime.feature(FaultTolerance).sharded_optimizers)
    return replacement


def _refusing_layer_wise(stock: Callable[..., Any], _: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.megatron.refusals import layer_wise_error

    @functools.wraps(stock)
    def __init__(optimizer: Any, *given: Any, **keywords: Any) -> None:  # noqa: N807
        if hasattr(optimizer, "shard_params"):  # LayerWiseDistributedOptimizer (from 0.16 on), whatever it is called
            raise layer_wise_error()
        stock(optimizer, *given, **keywords)

    return __init__


PATCHES = (
    Patch(
        identity="distributed-optimizer",
        target="megatron.core.optimizer:DistributedOptimizer",
        versions=SUPPORTED,
        parameters=("optimizer", "config", "grad_scaler", "model_chunks", "per_model_buffers", "data_parallel_group"),
        reason="a rank that fails takes its shard of the optimizer's state with it: another steps a copy of each",
        replace=_with_copies,
    ),
    Patch(
        identity="chained-optimizer",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.__init__",
        versions=SUPPORTED,
        parameters=("self", "chained_optimizers"),
        reason="a layer-wise optimizer, which is a chain, has shards of its state that no other rank has",
        replace=_refusing_layer_wise,
    ),
)
