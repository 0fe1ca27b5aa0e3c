# SPDX-License-Identifier: Apache-2.0
"""Marks in time around actions: the clock where compute blocks the CPU, CUDA events where it does not."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class ActionTimer(Protocol):
    """Marks moments without waiting; `resolve` turns marks of one iteration into time.monotonic() seconds."""

    def begin(self) -> None:
        """Start of an iteration."""

    def mark(self) -> Any:
        """Now, where compute happens."""

    def resolve(self, marks: list[Any]) -> list[float]:
        """Seconds of the marks. On GPU, waits once for the work before the last of them."""


class ClockTimer:
    """Compute runs on the calling thread: the clock says it all."""

    def begin(self) -> None:
        pass

    def mark(self) -> float:
        return time.monotonic()

    def resolve(self, marks: list[float]) -> list[float]:
        return marks


class CudaEventTimer:
    """Compute runs on the current CUDA stream: an event before and after each action."""

    def __init__(self) -> None:
        self._start: torch.cuda.Event | None = None
        self._start_s = 0.0

    def begin(self) -> None:
        self._start = _event()
        self._start.record()
        self._start.synchronize()  # once per iteration, while the stream is empty: relates events to the clock
        self._start_s = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        event = _event()
        event.record()
        return event

    def resolve(self, marks: list[torch.cuda.Event]) -> list[float]:
        if not marks:
            return []
        assert self._start is not None
        marks[-1].synchronize()
        return [self._start_s + self._start.elapsed_time(event) / 1e3 for event in marks]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_timer(device: torch.device) -> ActionTimer:
    """The timer for tensors on `device`."""
    return CudaEventTimer() if device.type == "cuda" else ClockTimer()
