# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.core.pipeline_parallel.schedules.

`get_forward_backward_func` reads the schedules as module globals at each call, so replacing the globals before the
training loop starts is enough. Modules that have imported a schedule by its name (Megatron-Bridge's `train`, for its
jobs of several models) get the replacement, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime

_MODULE = "megatron.core.pipeline_parallel.schedules"
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


PATCHES = (
    Patch(
        identity="schedule-1f1b",
        target=f"{_MODULE}:forward_backward_pipelining_without_interleaving",
        versions=SUPPORTED,
        parameters=(*_PARAMETERS, "p2p_communicator"),
        reason="runs the planned order of forward, input-gradient and weight-gradient actions instead of 1F1B",
        replace=functools.partial(_run, interleaved=False),
    ),
    Patch(
        identity="schedule-interleaved",
        target=f"{_MODULE}:forward_backward_pipelining_with_interleaving",
        versions=SUPPORTED,
        parameters=(*_PARAMETERS, "p2p_communicator"),
        reason="runs the planned order instead of interleaved 1F1B",
        replace=functools.partial(_run, interleaved=True),
    ),
    Patch(
        identity="schedule-none",
        target=f"{_MODULE}:forward_backward_no_pipelining",
        versions=SUPPORTED,
        parameters=_PARAMETERS,
        reason="runs stock's schedule for a pipeline of one stage, says so, and tells of its iterations",
        replace=_run_stock,
    ),
)
