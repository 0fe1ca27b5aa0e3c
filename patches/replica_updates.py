# SPDX-License-Identifier: Apache-2.0
"""Patches for parameter updates that some data-parallel replicas make without the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SYNC_MODE_SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.megatron.replica_updates import ReplicaUpdates

_FLAG = "under --adaptra-sync-mode other than ssgd: "


def _updates(runtime: AdaptraRuntime) -> ReplicaUpdates:
    from adaptra_megatron.engine.update_features import PartialUpdates

    return runtime.feature(PartialUpdates).updates


def _reduce(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    updates = _updates(runtime)

    @functools.wraps(stock)
    def start_grad_sync(bucket_group: Any, *given: Any, **keywords: Any) -> None:
        updates.start(stock, bucket_group, *given, **keywords)

    return start_grad_sync


def _step(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    updates = _updates(runtime)

    @functools.wraps(stock)
    def step(self: Any) -> Any:
        return updates.step(self, functools.partial(stock, self))

    return step


def _keep(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    updates = _updates(runtime)

    @functools.wraps(stock)
    def zero_grad_buffer(self: Any) -> None:
        # The training loop zeroes gradients before each iteration, also before one that this replica misses.
        if not updates.keeps_gradients:
            stock(self)

    return zero_grad_buffer


def _alone(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    updates = _updates(runtime)

    # train_step asks for this group to average losses, which it does at each iteration (training.py).
    @functools.wraps(stock)
    def get_data_parallel_group(*given: Any, **keywords: Any) -> Any:
        alone = updates.group_alone
        return stock(*given, **keywords) if alone is None else alone

    return get_data_parallel_group


def _settled_after(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    # Before `pretrain` evaluates and saves, which meet all replicas again.
    @functools.wraps(stock)
    def train(*given: Any, **keywords: Any) -> Any:
        result = stock(*given, **keywords)
        runtime.settle()
        return result

    return train


def _settled_before(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    # By name: the iteration is at another position from release to release.
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        if signature.bind(*given, **keywords).arguments["iteration"] % get_args().log_interval == 0:
            runtime.settle()
        return stock(*given, **keywords)

    return training_log


PATCHES = (
    Patch(
        identity="update-reduction",
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("self", "force_all_reduce"),
        reason=f"{_FLAG}sums up gradients over the replicas that make an update",
        replace=_reduce,
    ),
    Patch(
        identity="update-step",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("self",),
        reason=f"{_FLAG}steps by an update's share of all gradients, and not in iterations that a replica has missed",
        replace=_step,
    ),
    Patch(
        identity="late-gradients",
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("self",),
        reason=f"{_FLAG}keeps a gradient until its update is made",
        replace=_keep,
    ),
    Patch(
        identity="losses-apart",
        target="megatron.core.parallel_state:get_data_parallel_group",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("with_context_parallel",),
        reason=f"{_FLAG}losses are not summed up over replicas that are in other iterations",
        replace=_alone,
    ),
    Patch(
        identity="end-together",
        target="megatron.training.training:train",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("model", "optimizer", "opt_param_scheduler"),
        reason=f"{_FLAG}all replicas end with the same parameters",
        replace=_settled_after,
    ),
    Patch(
        identity="log-together",
        target="megatron.training.training:training_log",
        versions=SYNC_MODE_SUPPORTED,
        parameters=("iteration", "learning_rate"),
        reason=f"{_FLAG}times of all ranks are gathered in iterations that are logged, so replicas meet in these",
        replace=_settled_before,
    ),
)
