# SPDX-License-Identifier: Apache-2.0
"""The stream of a device whose time is made up: as late as what it was told to do."""

from __future__ import annotations

from collections.abc import Callable


class MadeUpStream:
    """`time_s`: when the device is through with what is on it."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def stand_still_until(self, time_s: float) -> None:
        """Compute, or wait, that long."""
        self.time_s = max(self.time_s, time_s)


class MadeUpEvent:
    """As torch.cuda.Event with timing."""

    def __init__(self, streams: MadeUpStreams) -> None:
        self._streams = streams
        self.time_s: float | None = None

    def record(self) -> None:
        """On the current stream."""
        # What is put on a stream now cannot happen before.
        self.time_s = self._streams.current.time_s = max(self._streams.current.time_s, self._streams.begun_s())

    def synchronize(self) -> None:
        """Waits for nothing, but counts."""
        self._streams.synchronized += 1

    def elapsed_time(self, later: MadeUpEvent) -> float:
        """Milliseconds."""
        assert self.time_s is not None
        assert later.time_s is not None, "an event that was not recorded tells nothing"
        return 1e3 * (later.time_s - self.time_s)


class MadeUpStreams:
    """Implements `device_clock.TimedEvents`. The device's time 0 is when this was made; it may be ahead of the host."""

    def __init__(self, host_s: Callable[[], float]) -> None:
        self._host_s = host_s
        self._zero_s = host_s()
        self.current = MadeUpStream()
        self.events_made = 0
        self.synchronized = 0

    def begun_s(self) -> float:
        """The host's time since this was made."""
        return self._host_s() - self._zero_s

    def now_s(self) -> float:
        """When the device is through with the current stream."""
        return self.current.time_s

    def new_event(self) -> MadeUpEvent:
        self.events_made += 1
        return MadeUpEvent(self)
