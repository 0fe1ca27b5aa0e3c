# SPDX-License-Identifier: Apache-2.0
"""Moments on a GPU's stream in seconds of the host's monotonic clock; to mark one is not to wait for it.

The two clocks are related by anchors: events on a stream that nothing else is on, so the device comes to one as soon as
it is asked to, and a thread that looks for it again and again sees that at once. A thread that slept would see it once
woken, milliseconds later on a busy host. After an anchor the device's clock runs as it ran between the last two.
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
"""Clocks drift by some ppm, which is known after the second anchor."""
TRIES = 3
LOOK_S = 1e-3
"""How long one try looks for its anchor."""
EXACT_S = 2e-4
"""Between two looks an anchor must have been seen, to count; usually that is a tenth of it."""
OLDEST_S = 60.0
"""After so long without an anchor the next one is waited for, whatever stands before it in a queue of the device."""
_PAUSE_S = 5e-5
"""Between two looks for one that is waited for."""

Mark = Any
"""Opaque: an event of the device."""


class TimedEvents(Protocol):
    """The little of torch.cuda that tells times."""

    def new_event(self) -> Mark:
        """With `record()` (on the current stream), `query()`, `synchronize()` and `elapsed_time(later)` in ms, as
        torch.cuda's."""

    def record_apart(self) -> Mark:
        """A new event that the device comes to at once, on a stream of its own."""


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
    """An event, when the host saw the device come to it, and within which time that was."""

    event: Mark
    at_s: float
    width_s: float


class DeviceClock:
    """Marks moments on the current stream and tells them afterwards, all those of an iteration at once.

    Events are made once and used again. Not safe for threads: it belongs to the one that runs the pipeline.
    """

    def __init__(self, events: TimedEvents, host_s: Callable[[], float] = time.monotonic) -> None:
        self._events, self._host_s = events, host_s
        self._unused: deque[Mark] = deque()
        self._anchors: deque[_Anchor] = deque(maxlen=2)

    def mark(self) -> Mark:
        """When the current stream comes to this point."""
        mark = self._unused.pop() if self._unused else self._events.new_event()
        mark.record()
        return mark

    def reached(self, mark: Mark) -> bool:
        """Return whether the device has come to a mark; never waits. False, too, of a device that failed."""
        try:
            return bool(mark.query())
        except RuntimeError as error:
            logger.debug("a failed device comes to no mark: %s", error)
            return False

    def seconds(self, marks: Iterable[Mark]) -> list[float]:
        """Moments of marks that the device has come to: time.monotonic() seconds.

        Relates the clocks anew if that was last done too long ago: takes a millisecond per try at most, but the first
        time and when the device has let no anchor pass for a minute. Raises RuntimeError for an error of the device.
        """
        self._relate()
        latest = self._anchors[-1]
        s_per_ms = 1e-3 * self._rate()
        return [latest.at_s + latest.event.elapsed_time(mark) * s_per_ms for mark in marks]

    def use_again(self, marks: Sequence[Mark]) -> None:
        """Take back marks that are not needed any more."""
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
        """An anchor; infinitely wide where the device has not come to it in time, and is not waited for."""
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
        """Seconds of the host in one of the device."""
        if len(self._anchors) < 2:
            return 1.0
        earlier, latest = self._anchors
        return (latest.at_s - earlier.at_s) / (1e-3 * float(earlier.event.elapsed_time(latest.event)))
