# SPDX-License-Identifier: Apache-2.0
"""Patch of Megatron's gradient buffers, for counts of the micro-batches in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _with_counts(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.elastic.process_group import counts_of

    @functools.wraps(stock)
    def reset(buffer: Any) -> None:
        stock(buffer)
        # A count must be zeroed with its gradients: on its own it would still hold the last iteration's micro-batches.
        for counts in counts_of([buffer]):
            counts.zero_()

    return reset


PATCHES = (
    Patch(
        identity="gradient-counts",
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.reset",
        versions=SUPPORTED,
        parameters=("self",),
        reason="how many micro-batches a buffer's gradients hold is counted from 0 again where these are set to 0",
        replace=_with_counts,
    ),
)
