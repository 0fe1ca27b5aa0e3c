# SPDX-License-Identifier: Apache-2.0
"""Copies on side streams of the CPU that happen as late as CUDA allows: when a stream that waits for them goes on.

Until then their targets are NaN. What is read without a wait is wrong in every run, as it may be on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from testing.replacing import Replacement


class LateStream:
    """A stream. The program itself is on a stream whose work is done at once; work of the others is only noted."""

    def __init__(self, device: Any = None, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._work: deque[Callable[[], None]] = deque()
        self._launched = self._done = 0

    def launch(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was launched before."""
        self._launched += 1
        self._work.append(work)
        if self._at_once:
            self.catch_up(self._launched)

    def catch_up(self, launched: int) -> None:
        """Do the work up to this number of launches."""
        while self._done < launched:
            self._done += 1
            self._work.popleft()()

    def wait_stream(self, other: LateStream) -> None:
        """Wait for what is launched on `other` so far."""
        launched = other._launched
        self.launch(lambda: other.catch_up(launched))

    def wait_event(self, event: LateEvent) -> None:
        """Wait for the latest record of `event`."""
        self.launch(event.reached)


class LateEvent:
    """An event. Nothing waits for one that was never recorded."""

    reached: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: LateStream) -> None:
        """Mark what is launched on `stream` so far."""
        launched = stream._launched
        self.reached = lambda: stream.catch_up(launched)


def late_copies() -> list[Replacement]:
    """Return replacements of torch names, after those of `cuda_names`."""
    streams = [LateStream(at_once=True)]
    pinned: dict[int, torch.Tensor] = {}
    """Targets of copies to the CPU, by address: a copy whose source is one of them goes back to the device."""
    stock = torch.Tensor.copy_

    @contextmanager
    def entered(stream: LateStream) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if len(streams) == 1:
            return stock(target, source)
        if source.data_ptr() not in pinned:
            pinned[target.data_ptr()] = target
            source = source.clone()  # on a GPU it stays until the copy, though its storage is freed (record_stream)
        target.fill_(math.nan)
        streams[-1].launch(lambda: stock(target, source))
        return target

    return [
        Replacement(torch.cuda, "Stream", LateStream, "copies are late"),
        Replacement(torch.cuda, "Event", LateEvent, "copies are late"),
        Replacement(torch.cuda, "stream", entered, "copies are late"),
        Replacement(torch.cuda, "current_stream", lambda *_: streams[-1], "copies are late"),
        Replacement(torch.Tensor, "copy_", copied, "copies are late"),
    ]
