# SPDX-License-Identifier: Apache-2.0
"""Record times on a GPU's stream in seconds of the host's monotonic clock, without waiting for the device.

Anchors relate the two clocks. An anchor is an event on a stream without other work, so that the device reaches it as
soon as it is recorded, and a polling thread sees that immediately. (A sleeping thread would be woken milliseconds later
on a busy host.) After an anchor the device's clock is assumed to run at the rate between the last two anchors.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.gpu.cuda_device import CudaDevice

logger = logger_of(__name__)

ANCHOR_EVERY_S = 10.0
"""Interval between anchors: clocks drift by some ppm, which is measured from the second anchor on."""
TRIES = 3
LOOK_S = 1e-3
"""Longest time of one attempt at an anchor."""
EXACT_S = 2e-4
"""Longest gap between two polls around an anchor for it to count; usually a tenth of this."""
OLDEST_S = 60.0
"""Age of the latest anchor from which on the next is waited for, whatever precedes it in a hardware queue."""
_PAUSE_S = 5e-5
"""Pause between two polls for an anchor that is waited for."""

Mark = Any
"""Opaque: an event of the device."""


class TimedEvents(Protocol):
    """Timed events of torch.cuda."""

    def new_event(self) -> Mark:
        """Return an event with `record()` (on the current stream), `query()`, `synchronize()` and
        `elapsed_time(later)` in ms."""

    def record_apart(self) -> Mark:
        """Record a new event on a stream of its own, which the device passes at once."""


class CudaEvents:
    """TimedEvents of the current GPU."""

    def __init__(self) -> None:
        self._apart = CudaDevice(torch.device("cuda")).new_stream()

    def new_event(self) -> Mark:
        # blocking: the thread that waits for one sleeps instead of spinning on a core that training needs.
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def record_apart(self) -> Mark:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._apart)
        return event


class _Anchor(NamedTuple):
    """An anchor: event, host time at which it was seen, and uncertainty in seconds."""

    event: Mark
    at_s: float
    width_s: float


class DeviceClock:
    """Marks points of the current stream, and later converts all marks of an iteration to host time at once.

    Events are reused. Not thread-safe: for the thread that runs the pipeline.
    """

    def __init__(self, events: TimedEvents, host_s: Callable[[], float] = time.monotonic) -> None:
        self._events, self._host_s = events, host_s
        self._unused: deque[Mark] = deque()
        self._anchors: deque[_Anchor] = deque(maxlen=2)

    def mark(self) -> Mark:
        """Mark the present end of the current stream."""
        mark = self._unused.pop() if self._unused else self._events.new_event()
        mark.record()
        return mark

    def reached(self, mark: Mark) -> bool:
        """Return whether the device has passed a mark; False if it failed. Never waits."""
        try:
            return bool(mark.query())
        except RuntimeError as error:
            logger.debug("a failed device comes to no mark: %s", error)
            return False

    def seconds(self, marks: Iterable[Mark]) -> list[float]:
        """Return the times (time.monotonic, seconds) of marks that the device has passed.

        Takes a new anchor if the last is too old, in about 1 ms. The first time, and after a minute without one, it
        waits for the anchor. Raises RuntimeError if the device failed.
        """
        self._relate()
        latest = self._anchors[-1]
        s_per_ms = 1e-3 * self._rate()
        return [latest.at_s + latest.event.elapsed_time(mark) * s_per_ms for mark in marks]

    def use_again(self, marks: Sequence[Mark]) -> None:
        """Return marks for reuse."""
        self._unused.extend(marks)

    def _relate(self) -> None:
        age_s = self._host_s() - self._anchors[-1].at_s if self._anchors else math.inf
        if age_s < ANCHOR_EVERY_S:
            return
        waits = age_s >= OLDEST_S
        best = min((self._anchor(waits) for _ in range(TRIES)), key=lambda anchor: anchor.width_s)
        if best.width_s <= EXACT_S or waits:
            self._anchors.append(best)

    def _anchor(self, waits: bool) -> _Anchor:
        """Take an anchor; its uncertainty is infinite if the device did not pass it in time and `waits` is False."""
        not_before_s = began_s = self._host_s()
        event = self._events.record_apart()
        while True:
            looks_s = self._host_s()
            if event.query():
                seen_s = self._host_s()
                return _Anchor(event, (not_before_s + seen_s) / 2, seen_s - not_before_s)
            not_before_s = looks_s  # however late this thread is by now
            if looks_s >= began_s + LOOK_S:
                if not waits:
                    return _Anchor(event, looks_s, math.inf)
                time.sleep(_PAUSE_S)

    def _rate(self) -> float:
        """Return host seconds per device second."""
        if len(self._anchors) < 2:
            return 1.0
        earlier, latest = self._anchors
        return (latest.at_s - earlier.at_s) / (1e-3 * float(earlier.event.elapsed_time(latest.event)))
