# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron's waits for other replicas and for data. They measure stragglers and change no results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.engine.sync_arrivals import SyncWaits


def _waits(runtime: AdaptraRuntime) -> SyncWaits:
    from adaptra_megatron.engine.features import StragglerMonitoring

    return runtime.feature(StragglerMonitoring).waits


def _timed_sync(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    waits = _waits(runtime)

    @functools.wraps(stock)
    def finish_grad_sync(chunk: Any, *given: Any, **keywords: Any) -> Any:
        return waits.synchronize(functools.partial(stock, chunk, *given, **keywords))

    return finish_grad_sync


def _timed_data(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    waits = _waits(runtime)

    # Megatron-LM wraps all data iterators of its loop (training.py, build_train_valid_test_data_iterators).
    @functools.wraps(stock)
    def next_batch(iterator: Any) -> Any:
        return waits.read(functools.partial(stock, iterator))

    return next_batch


PATCHES = (
    Patch(
        identity="gradient-sync-time",
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.finish_grad_sync",
        versions=SUPPORTED,
        parameters=("self",),
        reason="times how long gradients of other replicas are waited for, to tell which replica comes last",
        replace=_timed_sync,
    ),
    Patch(
        identity="data-time",
        target="megatron.core.rerun_state_machine:RerunDataIterator.__next__",
        versions=SUPPORTED,
        parameters=("self",),
        reason="times how long data are waited for, to tell why a replica comes last",
        replace=_timed_data,
    ),
)
