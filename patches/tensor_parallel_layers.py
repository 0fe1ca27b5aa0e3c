# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.core.tensor_parallel.layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _split(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

    return runtime.weight_gradients.wrap(stock, LinearWithGradAccumulationAndAsyncCommunication.forward)


PATCHES = (
    Patch(
        identity="linear-backward",
        target="megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        versions=SUPPORTED,
        parameters=("ctx", "grad_output"),
        reason="leaves the weight gradient for a later action while a split backward runs; else stock's code runs",
        replace=_split,
    ),
)
