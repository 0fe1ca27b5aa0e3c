# SPDX-License-Identifier: Apache-2.0
"""Patches for optimizer steps that do not wait for the slowest stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import STAGGERED_OPTIMIZER_SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _step(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.update_features import StaggeredSteps

    staggered = runtime.feature(StaggeredSteps).optimizer

    @functools.wraps(stock)
    def step(self: Any) -> Any:
        return staggered.step(self, functools.partial(stock, self))

    return step


def _reduce_unless_norm(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.megatron.gradients.gradient_norm import KnownNorm, PendingNorm

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


PATCHES = (
    Patch(
        identity="optimizer-step",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        versions=STAGGERED_OPTIMIZER_SUPPORTED,
        parameters=("self",),
        reason="under --adaptra-staggered-optimizer: steps before the norm of all stages' gradients is known",
        replace=_step,
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
