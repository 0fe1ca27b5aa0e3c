# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.training's checkpointing. Scripts without megatron.training save as they like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _save(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save_checkpoint(*given: Any, **keywords: Any) -> Any:
        # The whole call, since it is made again if a rank fails meanwhile.
        return runtime.save(functools.partial(stock, *given, **keywords))

    return save_checkpoint


PATCHES = (
    Patch(
        identity="save-checkpoint",
        target="megatron.training.training:save_checkpoint",
        versions=SUPPORTED,
        parameters=("iteration", "model", "optimizer", "opt_param_scheduler"),
        reason="after rank failures, live ranks write the checkpoint as if they were all, and again if one fails",
        replace=_save,
    ),
)
