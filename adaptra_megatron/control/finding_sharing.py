# SPDX-License-Identifier: Apache-2.0
"""Add names of ranks and hosts to findings, and collect all leaders' findings at the first replica's leader, which
logs them once for the whole job."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.control.decisions import MAX_DECISION_NBYTES, TelemetrySection
from adaptra_megatron.telemetry.events import (
    Event,
    LinkDetection,
    StageDetection,
    Stamp,
    StampedEvent,
    decode,
    encode,
)

# Users' requests (traces, another policy) come to one replica's leader, which shares them with all others.


class SharedRequests:
    """One leader's end. Not thread-safe."""

    def __init__(self, store: Any, take: Callable[[], TelemetrySection] | None) -> None:
        """`store`: a SealedStore that all leaders share. `take`: returns new requests, on the leader that gets
        them from users; None on the others."""
        self._store, self._take, self._number = store, take, 0

    def new(self) -> TelemetrySection:
        """Return the requests since the last call; none if the store cannot be reached."""
        key, found = f"requests/{self._number}", TelemetrySection() if self._take is None else self._take()
        with contextlib.suppress(RuntimeError):  # at the end of a job the store goes with its process
            if found != TelemetrySection():
                self._store.set(key, packed(found))
            elif self._take is None and (entry := self._store.peek(key)) is not None:
                found = unpacked(entry, TelemetrySection, MAX_DECISION_NBYTES)
        self._number += found != TelemetrySection()
        return found


MOST_AT_ONCE = 64
"""Maximum number of events that one call of `exchange` receives."""
_COUNT = "count"


class EventDiary(Protocol):
    """Recipient of events."""

    def log(self, event: Event) -> None:
        """Record an event of the current iteration."""


class NamedFindings:
    """Adds ranks, hosts, RNICs, replica and lane to findings, and passes all events on."""

    def __init__(self, layout: JobLayout, diary: EventDiary) -> None:
        self._layout, self._diary = layout, diary

    def log(self, event: Event) -> None:
        """Add the names to an event, and pass it on."""
        self._diary.log(self._named(event))

    def _named(self, event: Event) -> Event:
        if not isinstance(event, LinkDetection | StageDetection) or event.pipeline not in self._layout.workers:
            return event
        ranks, workers = self._layout.pipeline_of(event.pipeline), self._layout.workers
        first = workers[event.pipeline]
        if isinstance(event, StageDetection):
            rank = ranks[event.stage]
            return replace(event, replica=first.cell.replica, stage_rank=rank, host=workers[rank].host)
        source, target = (workers[ranks[stage]] for stage in (event.source, event.target))
        return replace(
            event,
            replica=first.cell.replica,
            lane=first.lane,
            source_rank=ranks[event.source],
            target_rank=ranks[event.target],
            source_host=source.host,
            target_host=target.host,
            source_rnics=tuple(filter(None, source.rnics.split(","))),
            target_rnics=tuple(filter(None, target.rnics.split(","))),
        )


class SharedFindings:
    """One leader's end, if each replica has a leader of its own."""

    def __init__(self, store: Any, layout: JobLayout, take: Callable[[int, Event], None] | None) -> None:
        """`store`: a SealedStore that all leaders share. `take(replica, event)`: takes in the others'
        findings, on the leader that logs all; None on the others."""
        self._store, self._layout, self._take = store, layout, take
        self._posted: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._number = 0

    def post(self, event: Event) -> None:
        """Queue `event` for the first replica's leader; returns at once. Thread-safe."""
        self._posted.put(event)

    def exchange(self) -> None:
        """Send the queued events, or receive those of the others. Call in one thread, after each iteration."""
        with contextlib.suppress(RuntimeError):  # at the end of a job the store goes with its process
            if self._take is None:
                while not self._posted.empty():
                    self._send(self._posted.get())
            else:
                self._receive(self._take)

    def _send(self, event: Event) -> None:
        stamp = Stamp(
            run="", rank=self._layout.rank, sequence=0, iteration=-1, wall_s=time.time(), monotonic_s=time.monotonic()
        )
        number = self._store.add(_COUNT, 1) - 1
        self._store.set(str(number), encode(StampedEvent(stamp=stamp, event=event)).encode())

    def _receive(self, take: Callable[[int, Event], None]) -> None:
        for _ in range(MOST_AT_ONCE):
            key = str(self._number)
            if (entry := self._store.peek(key)) is None:
                return
            self._number += 1
            self._store.delete_key(key)
            stamped = decode(entry.decode())
            take(self._layout.workers[stamped.stamp.rank].cell.replica, stamped.event)
