# SPDX-License-Identifier: Apache-2.0
"""The stream of a device whose time is made up: as late as the test has set."""

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

    def query(self) -> bool:
        """Return whether the device is there by now."""
        self._streams.check()
        assert self.time_s is not None
        return self._streams.begun_s() >= self.time_s

    def synchronize(self) -> None:
        """Waits for nothing, but counts."""
        self._streams.check()
        self._streams.synchronized += 1

    def elapsed_time(self, later: MadeUpEvent) -> float:
        """Milliseconds."""
        assert self.time_s is not None
        assert later.time_s is not None, "an event that was not recorded tells nothing"
        return 1e3 * (later.time_s - self.time_s)


class MadeUpStreams:
    """Implements `device_clock.TimedEvents`. The device's time 0 is when this was made; it may be ahead of the host."""

    def __init__(self, host_s: Callable[[], float], drift: float = 0.0) -> None:
        """`drift`: seconds that the device's clock gains in one of the host's."""
        self._host_s, self._rate = host_s, 1.0 + drift
        self.zero_s = host_s()
        self.current, self.apart = MadeUpStream(), MadeUpStream()
        self.events_made = 0
        self.synchronized = 0
        self.failure: RuntimeError | None = None

    def begun_s(self) -> float:
        """The device's clock: its time since this was made."""
        return (self._host_s() - self.zero_s) * self._rate

    def check(self) -> None:
        """Raise the device's error, if it has one."""
        if self.failure is not None:
            raise self.failure

    def now_s(self) -> float:
        """When the device is through with the current stream."""
        return self.current.time_s

    def new_event(self) -> MadeUpEvent:
        self.events_made += 1
        return MadeUpEvent(self)

    def record_apart(self) -> MadeUpEvent:
        event = self.new_event()
        event.time_s = self.apart.time_s = max(self.apart.time_s, self.begun_s())
        return event
