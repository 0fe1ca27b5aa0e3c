# SPDX-License-Identifier: Apache-2.0
"""The patch of Megatron's distributed optimizer, for training that outlives its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.runtime.runtime import AdaptraRuntime


def _with_copies(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.runtime.megatron.state.shard_copies import with_copies

    replacement: Callable[..., Any] = with_copies(stock, runtime.sharded_optimizers)
    return replacement


PATCHES = (
    Patch(
        identity="distributed-optimizer",
        target="megatron.core.optimizer:DistributedOptimizer",
        versions=SUPPORTED,
        parameters=("optimizer", "config", "grad_scaler", "model_chunks", "per_model_buffers", "data_parallel_group"),
        reason="a rank that dies takes its shard of the optimizer's state with it: another steps a copy of each",
        replace=_with_copies,
    ),
)
