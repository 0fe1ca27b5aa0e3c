# SPDX-License-Identifier: Apache-2.0
"""Moments on a GPU's stream in seconds of the host's monotonic clock; to mark one is not to wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

Mark = Any
"""Opaque: an event of the device."""


class TimedEvents(Protocol):
    """The little of torch.cuda that tells times."""

    def new_event(self) -> Mark:
        """With `record()` (on the current stream), `synchronize()` and `elapsed_time(later)` in ms, as torch.cuda's."""


class CudaEvents:
    """TimedEvents of the current GPU."""

    def new_event(self) -> Mark:
        # blocking: the thread that waits for one sleeps instead of spinning on a core that training needs.
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Marks moments on the current stream and tells them afterwards, all those of an iteration at once.

    Events are made once and used again. Not safe for threads: it belongs to the one that runs the pipeline.
    """

    def __init__(self, events: TimedEvents) -> None:
        self._events = events
        self._unused: deque[Mark] = deque()
        self._anchor = events.new_event()
        self._anchor_s = 0.0

    def mark(self) -> Mark:
        """When the current stream comes to this point."""
        mark = self._unused.pop() if self._unused else self._events.new_event()
        mark.record()
        return mark

    def relate(self, last: Mark) -> None:
        """Wait for `last`, the latest mark of the current stream, and relate the device's clock to the host's.

        Once per iteration, when the stream holds nothing more: the moment that the host sees is then the device's, to
        the few microseconds that an empty stream takes. Raises RuntimeError for an error of the device.
        """
        last.synchronize()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = time.monotonic()

    def seconds(self, marks: Iterable[Mark]) -> list[float]:
        """Moments of marks that the device has come to, by the latest `relate`: time.monotonic() seconds."""
        return [self._anchor_s - mark.elapsed_time(self._anchor) / 1e3 for mark in marks]

    def use_again(self, marks: Sequence[Mark]) -> None:
        """Take back marks that nobody needs any more."""
        self._unused.extend(marks)
