# SPDX-License-Identifier: Apache-2.0
"""Patches for checkpoints that are written in the background (--async-save) while ranks fail and rejoin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime

_QUEUES = {
    "": "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue",
    "-nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core:AsyncCallsQueue",
}
"""Classes of the same interface; from 0.17 on --async-strategy chooses one."""


def _scheduled(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def schedule_async_request(self: Any, async_request: Any) -> Any:
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        return runtime.feature(FaultTolerance).schedule_save(stock, self, async_request)

    return schedule_async_request


def _finalized(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def maybe_finalize_async_calls(self: Any, blocking: bool = False, no_dist: bool = False) -> Any:
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        feature = runtime.feature(FaultTolerance)
        return feature.finalize_saves(stock, self, blocking=blocking, no_dist=no_dist)

    return maybe_finalize_async_calls


def _decided(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def checkpoint_and_decide_exit(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args, training

        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        # Stock first: where it saves or exits itself, nothing is due any more.
        exits = stock(*given, **keywords)
        args, arguments = get_args(), signature.bind(*given, **keywords).arguments
        # The last iteration is saved once training has ended.
        if runtime.feature(FaultTolerance).saves.is_due and not exits and arguments["iteration"] < args.train_iters:
            training.save_checkpoint_and_time(**arguments)
        return exits

    return checkpoint_and_decide_exit


PATCHES = (
    *(
        Patch(
            identity=f"{name}{which}",
            target=f"{queue}.{method}",
            versions=SUPPORTED,
            parameters=parameters,
            reason=reason,
            replace=replace,
        )
        for which, queue in _QUEUES.items()
        for name, method, parameters, reason, replace in (
            (
                "schedule-async-save",
                "schedule_async_request",
                ("async_request",),
                "a checkpoint belongs to the ranks that live when its writing begins",
                _scheduled,
            ),
            (
                "finalize-async-save",
                "maybe_finalize_async_calls",
                ("blocking", "no_dist"),
                "a checkpoint that ranks fail in while it is written in the background is given up on all ranks",
                _finalized,
            ),
        )
    ),
    Patch(
        identity="early-checkpoint",
        target="megatron.training.training:checkpoint_and_decide_exit",
        versions=SUPPORTED,
        parameters=("model", "optimizer", "opt_param_scheduler", "iteration", "checkpointing_context"),
        reason="after a checkpoint has been given up, the next one is written early",
        replace=_decided,
    ),
)
