# SPDX-License-Identifier: Apache-2.0
"""Patches for other gradient sums and updates: around a straggler, by some of the replicas, and before the norm of all
stages' gradients is known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import (
    GRADIENT_SYNC_SUPPORTED,
    STAGGERED_OPTIMIZER_SUPPORTED,
    SYNC_MODE_SUPPORTED,
    Patch,
)

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.megatron.gradients.gradient_reduction import GradientReduction
    from adaptra_megatron.megatron.replica_updates import ReplicaUpdates


def _handing_over(stock: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that calls `method` with the original and the arguments."""

    @functools.wraps(stock)
    def replacement(*given: Any, **keywords: Any) -> Any:
        return method(stock, *given, **keywords)

    return replacement


def _around_straggler(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    # Called by hooks (register_grad_ready), by finish_grad_sync, and by DistributedDataParallel for all bucket groups.
    return _handing_over(stock, _reduction(runtime).start)


def _waiting(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    return _handing_over(stock, _reduction(runtime).finish)


def _reduction(runtime: AdaptraRuntime) -> GradientReduction:
    from adaptra_megatron.engine.update_features import ReplicaReductions

    return runtime.feature(ReplicaReductions).reduction


_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

GRADIENT_PATCHES = (
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


_FLAG = "under --adaptra-sync-mode other than ssgd: "


def _updates(runtime: AdaptraRuntime) -> ReplicaUpdates:
    from adaptra_megatron.engine.update_features import PartialUpdates

    return runtime.feature(PartialUpdates).updates


def _reduce(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    return _handing_over(stock, _updates(runtime).start)


def _step_by_share(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
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


UPDATE_PATCHES = (
    Patch(
        identity="update-reduction",
        target=f"{_BUCKETS}.start_grad_sync",
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
        replace=_step_by_share,
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


def _step_early(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.update_features import StaggeredSteps

    staggered = runtime.feature(StaggeredSteps).optimizer

    @functools.wraps(stock)
    def step(self: Any) -> Any:
        return staggered.step(self, functools.partial(stock, self))

    return step


def _reduce_unless_norm(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.megatron.staggered_optimizer import KnownNorm, PendingNorm

    # training.py, train_step: what ChainedOptimizer.step returned is reduced over the pipeline, for ranks that train no
    # parameters and so have no norm. Such ranks are refused (staggered_optimizer.py).
    @functools.wraps(stock)
    def reduce_max_stat(stat: Any, *given: Any, **keywords: Any) -> Any:
        return stat if isinstance(stat, (KnownNorm, PendingNorm)) else stock(stat, *given, **keywords)

    return reduce_max_stat


def _take_as_known(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def logical_and(input: bool, *given: Any, **keywords: Any) -> bool:
        return input

    return logical_and


STAGGERING_PATCHES = (
    Patch(
        identity="optimizer-step",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        versions=STAGGERED_OPTIMIZER_SUPPORTED,
        parameters=("self",),
        reason="under --adaptra-staggered-optimizer: steps before the norm of all stages' gradients is known",
        replace=_step_early,
    ),
    Patch(
        identity="norm-across-stages",
        target="megatron.training.training:reduce_max_stat_across_model_parallel_group",
        versions=STAGGERED_OPTIMIZER_SUPPORTED,
        parameters=("stat",),
        reason="under --adaptra-staggered-optimizer: the norm is everywhere the same, and to reduce it again is a "
        "barrier; other figures are reduced as ever",
        replace=_reduce_unless_norm,
    ),
    Patch(
        identity="success-across-stages",
        target="megatron.training.training:logical_and_across_model_parallel_group",
        versions=STAGGERED_OPTIMIZER_SUPPORTED,
        parameters=("input",),
        reason="under --adaptra-staggered-optimizer: every step succeeds (loss scalers are refused), and to ask all "
        "stages is a barrier",
        replace=_take_as_known,
    ),
)
