# SPDX-License-Identifier: Apache-2.0
"""Megatron's own timers of compute and communication (`--timing-log-level 2`), while actions run in our order.

Its forward_step and backward_step start 'forward-compute' and 'backward-compute' here as in stock. What stock times in
other functions is added from what was measured anyway: waiting for messages as 'forward-recv' and 'backward-recv',
weight gradients as part of 'backward-compute'. No rank waits for sends, so there are no times of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adaptra_megatron.runtime.execution.executor import IterationReport
from adaptra_megatron.schedule.actions import Kind

_LEVEL = 2
"""Log level of timers of single actions; those of whole iterations have level 1."""


def add_times(timers: Any, report: IterationReport) -> None:
    """Add what one iteration spent to `timers` (megatron.core.timers.Timers), where they log such detail."""
    if timers._log_level < _LEVEL:
        return  # what it would hand out stands for all that are not logged
    spent_s: dict[str, float] = defaultdict(float)
    for step, record in zip(report.steps, report.records, strict=True):
        kind = step.action.kind
        if step.receive is not None:
            spent_s["forward-recv" if kind is Kind.FORWARD else "backward-recv"] += record.wait_s
        if kind is Kind.BACKWARD_WEIGHT:
            spent_s["backward-compute"] += record.compute_s
    for name, seconds in spent_s.items():
        timer = timers(name, log_level=_LEVEL)
        timer._elapsed += seconds
        timer._active_time += seconds


@contextmanager
def waiting_for_computation_alone() -> Iterator[None]:
    """While open, torch.cuda.synchronize() waits for the current stream, not for the whole device.

    Receives are posted before their senders have what they send: a rank that waits for its whole device in the midst of
    an iteration waits for messages that its peers are still to make, and Megatron would count that as computation.
    """
    whole_device = torch.cuda.synchronize
    torch.cuda.synchronize = _wait_for_current_stream
    try:
        yield
    finally:
        torch.cuda.synchronize = whole_device


def _wait_for_current_stream(device: Any = None) -> None:
    torch.cuda.current_stream(device).synchronize()
