# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.core.timers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _wait_for_computation_alone(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.measuring import waiting_for_computation_alone

    @functools.wraps(stock)
    def start_or_stop(timer: Any, barrier: bool = False) -> None:
        with waiting_for_computation_alone() if runtime.runs_actions else contextlib.nullcontext():
            stock(timer, barrier)

    return start_or_stop


_REASON = (
    "between the actions of an iteration it waits for computation, not for the whole GPU: messages that are being "
    "received there would count as computation"
)

PATCHES = tuple(
    Patch(
        identity=f"timer-{action}",
        target=f"megatron.core.timers:Timer.{action}",
        versions=SUPPORTED,
        parameters=("self", "barrier"),
        reason=_REASON,
        replace=_wait_for_computation_alone,
    )
    for action in ("start", "stop")
)
