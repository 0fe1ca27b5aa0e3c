# SPDX-License-Identifier: Apache-2.0
"""Marks in time around actions: the clock where compute blocks the CPU, CUDA events where it does not."""

from __future__ import annotations

import time
from typing import Any, Protocol

from adaptra_megatron.transport.gpu.device_clock import DeviceClock, Mark


class ActionTimer(Protocol):
    """Marks moments without waiting; `resolve` turns marks of one iteration into time.monotonic() seconds."""

    def mark(self) -> Any:
        """Now, where compute happens."""

    def over(self, marks: list[Any]) -> bool:
        """Return whether all of them have been reached; never waits."""

    def resolve(self, marks: list[Any]) -> list[float]:
        """Seconds of the marks, which are not used again. On a GPU, waits for the work before the last of them."""


class ClockTimer:
    """Compute runs on the calling thread: the clock says it all."""

    def mark(self) -> float:
        return time.monotonic()

    def over(self, marks: list[float]) -> bool:
        return True

    def resolve(self, marks: list[float]) -> list[float]:
        return marks


class CudaEventTimer:
    """Compute runs on the current CUDA stream: an event before and after each action."""

    def __init__(self, clock: DeviceClock) -> None:
        """`clock`: a transport may tell its own marks by it, too."""
        self._clock = clock
        self.mark = clock.mark

    def over(self, marks: list[Mark]) -> bool:
        return not marks or self._clock.reached(marks[-1])

    def resolve(self, marks: list[Mark]) -> list[float]:
        if not marks:
            return []
        marks[-1].synchronize()
        seconds = self._clock.seconds(marks)
        self._clock.use_again(marks)
        return seconds


def make_timer(clock: DeviceClock | None) -> ActionTimer:
    """The timer for compute on the device of `clock`; None: on the CPU."""
    return ClockTimer() if clock is None else CudaEventTimer(clock)
