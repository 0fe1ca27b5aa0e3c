# SPDX-License-Identifier: Apache-2.0
"""Patches of every run, whatever its flags; and those that measure stragglers, which change no results.

`get_forward_backward_func` reads the schedules as module globals at each call, so replacing the globals before the
training loop starts is enough. Modules that have imported a schedule by its name (Megatron-Bridge's `train`, for its
jobs of several models) get the replacement, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.engine.sync_arrivals import SyncWaits

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARAMETERS = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
)
"""What every release has; `megatron.compat` has the later ones."""


def _run(stock: Callable[..., Any], runtime: AdaptraRuntime, *, interleaved: bool) -> Callable[..., Any]:
    # Stock's schedules take keywords alone (`*` comes first), so names are enough to find the arguments.
    @functools.wraps(stock)
    def forward_backward(**arguments: Any) -> Any:
        return runtime.forward_backward(arguments, interleaved=interleaved, stock=stock)

    return forward_backward


def _run_stock(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward_backward(**arguments: Any) -> Any:
        return runtime.run_stock(stock, arguments)

    return forward_backward


def _split(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

    # The forward's parameters tell how many gradients a backward returns; releases differ.
    return runtime.weight_gradients.wrap(stock, LinearWithGradAccumulationAndAsyncCommunication.forward)


def _wait_for_computation_alone(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.measuring import waiting_for_computation_alone

    @functools.wraps(stock)
    def start_or_stop(timer: Any, barrier: bool = False) -> None:
        with waiting_for_computation_alone() if runtime.runs_actions else contextlib.nullcontext():
            stock(timer, barrier)

    return start_or_stop


def _save(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_checkpoint(*given: Any, **keywords: Any) -> Any:
        context = signature.bind(*given, **keywords).arguments.get("checkpointing_context")
        # The whole call, since it is made again if a rank fails meanwhile.
        return runtime.save(functools.partial(stock, *given, **keywords), context)

    return save_checkpoint


def _waits(runtime: AdaptraRuntime) -> SyncWaits:
    from adaptra_megatron.engine.features import StragglerMonitoring

    return runtime.feature(StragglerMonitoring).waits


def _timed_sync(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    waits = _waits(runtime)

    # Only the end is timed: with overlapped reductions, the start returns before any replica is waited for.
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
        identity="schedule-1f1b",
        target=f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
        versions=SUPPORTED,
        parameters=(*_PARAMETERS, "p2p_communicator"),
        reason="runs the planned order of forward, input-gradient and weight-gradient actions instead of 1F1B",
        replace=functools.partial(_run, interleaved=False),
    ),
    Patch(
        identity="schedule-interleaved",
        target=f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving",
        versions=SUPPORTED,
        parameters=(*_PARAMETERS, "p2p_communicator"),
        reason="runs the planned order instead of interleaved 1F1B",
        replace=functools.partial(_run, interleaved=True),
    ),
    Patch(
        identity="schedule-none",
        target=f"{_SCHEDULES}:forward_backward_no_pipelining",
        versions=SUPPORTED,
        parameters=_PARAMETERS,
        reason="runs stock's schedule for a pipeline of one stage, says so, and tells of its iterations",
        replace=_run_stock,
    ),
    Patch(
        identity="linear-backward",
        target="megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        versions=SUPPORTED,
        parameters=("ctx", "grad_output"),
        reason="leaves the weight gradient for a later action while a split backward runs; else stock's code runs",
        replace=_split,
    ),
    *(
        Patch(
            identity=f"timer-{action}",
            target=f"megatron.core.timers:Timer.{action}",
            versions=SUPPORTED,
            parameters=("self", "barrier"),
            reason="between the actions of an iteration it waits for computation, not for the whole GPU: messages that "
            "are being received there would count as computation",
            replace=_wait_for_computation_alone,
        )
        for action in ("start", "stop")
    ),
)
"""Everything that is changed in Megatron, in the order in which it is applied."""

TRAINING_PATCHES = (
    Patch(
        identity="save-checkpoint",
        target="megatron.training.training:save_checkpoint",
        versions=SUPPORTED,
        parameters=("iteration", "model", "optimizer", "opt_param_scheduler"),
        reason="after rank failures, live ranks write the checkpoint as if they were all, and again if one fails",
        replace=_save,
    ),
)
"""Of megatron.training's checkpointing. Scripts without megatron.training save as they like."""

WATCHING_PATCHES = (
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
"""Of waits for other replicas and for data, if these are watched."""
