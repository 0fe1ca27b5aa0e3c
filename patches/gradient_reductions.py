# SPDX-License-Identifier: Apache-2.0
"""Patch of Megatron's gradient reductions, for sums that work around a straggler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import GRADIENT_SYNC_SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _around_straggler(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.update_features import ReplicaReductions

    reduction = runtime.feature(ReplicaReductions).reduction

    # Called by hooks (register_grad_ready), by finish_grad_sync, and by DistributedDataParallel for all bucket groups.
    @functools.wraps(stock)
    def start_grad_sync(bucket_group: Any, *given: Any, **keywords: Any) -> None:
        reduction.start(stock, bucket_group, *given, **keywords)

    return start_grad_sync


def _waiting(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.update_features import ReplicaReductions

    reduction = runtime.feature(ReplicaReductions).reduction

    @functools.wraps(stock)
    def finish_grad_sync(bucket_group: Any, *given: Any, **keywords: Any) -> None:
        reduction.finish(stock, bucket_group, *given, **keywords)

    return finish_grad_sync


_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

PATCHES = (
    Patch(
        identity="gradient-reduction",
        target=f"{_BUCKETS}.start_grad_sync",
        versions=GRADIENT_SYNC_SUPPORTED,
        parameters=("self", "force_all_reduce"),
        reason="with --adaptra-gradient-sync, sums up gradients around the replica that comes last",
        replace=_around_straggler,
    ),
    Patch(
        identity="gradient-reduction-end",
        target=f"{_BUCKETS}.finish_grad_sync",
        versions=GRADIENT_SYNC_SUPPORTED,
        parameters=("self", "force_all_reduce"),
        reason="waits for sums around a straggler also where there are several instances of the distributed optimizer",
        replace=_waiting,
    ),
)
