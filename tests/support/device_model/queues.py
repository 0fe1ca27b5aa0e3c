# SPDX-License-Identifier: Apache-2.0
"""The devices of a job: what starts when, and when it ends."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

from support.device_model.calls import Collective, Communicator, Compute, Record, StreamWait
from support.device_model.state import Device, DeviceState, Work


class Clock:
    """Things that happen at given moments; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = itertools.count()

    def after(self, seconds: float, happen: Callable[[Any], None], subject: Any) -> None:
        """Call `happen(subject)` so much later."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._sequence), happen, subject))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, happen, subject = heapq.heappop(self._events)
            happen(subject)


class Queues:
    """All hardware queues of all devices."""

    def __init__(
        self,
        kind: Device,
        clock: Clock,
        random: Random,
        ended: Callable[[Work], None],
        started: Callable[[DeviceState], None],
    ) -> None:
        """`ended` is called for each work when it has ended, `started` with a device when it has started one."""
        self._kind, self._clock, self._random, self._ended, self._started = kind, clock, random, ended, started
        self._met: dict[Hashable, list[Work]] = {}
        """Started ends of transfers and collectives whose others have not started."""

    def issue(self, work: Work) -> None:
        """Put `work` on its queue, behind what it waits for."""
        device = work.device
        for before in (*work.after, work.previous):
            if before is not None and not before.ended:
                before.then.append(work)
                work.missing += 1
        if work.ordered is not None:
            starts = self._kind.launch_order == "started"
            if not (work.ordered.started if starts else work.ordered.ended):
                (work.ordered.on_start if starts else work.ordered.then).append(work)
                work.missing += 1
        device.unfinished[work] = None
        queue = device.queues[work.queue]
        queue.append(work)
        if queue[0] is work:
            self._start_next(device, work.queue)

    def abort(self, device: DeviceState, communicator: Communicator) -> None:
        """End the communicator's kernels on one device, those that are yet to start as soon as they do."""
        device.aborted.add(communicator)
        for work in device.resident:
            if getattr(work.call, "communicator", None) == communicator:
                for end in work.ends:
                    if work in (met := self._met.get(end, [])):
                        met.remove(work)
                self._clock.after(0.0, self._end, work)

    def _start_next(self, device: DeviceState, number: int) -> None:
        queue = device.queues[number]
        while queue:
            work = queue[0]
            before = device.running[number]
            if work.missing or (before is not None and not before.ended):
                return
            if device.free_blocks is not None:
                if device.free_blocks < (1 if isinstance(work.call, Compute) else work.blocks):
                    device.short_of_blocks.add(number)
                    return
                device.free_blocks -= work.blocks
            queue.popleft()
            if self._kind.serial:
                device.running[number] = work
            self._start(work)
            self._started(device)

    def _start(self, work: Work) -> None:
        call, clock = work.call, self._clock
        work.started, work.started_s = True, clock.now_s
        work.device.resident[work] = None
        for other in work.on_start:
            self._less_missing(other)
        if isinstance(call, Compute):
            noise = self._kind.noise
            seconds = call.seconds * self._random.uniform(1.0 - noise, 1.0 + noise) if noise else call.seconds
            clock.after(seconds, self._end, work)
        elif isinstance(call, (StreamWait, Record)) or call.communicator in work.device.aborted:
            clock.after(0.0, self._end, work)
        elif isinstance(call, Collective):
            for each in self._all_here(work, work.ends[0], call.members):
                clock.after(call.seconds, self._end, each)
        else:
            for transfer, end in zip(call.transfers, work.ends, strict=True):
                for each in self._all_here(work, end, 2):
                    assert transfer in each.call.transfers, f"messages crossed: {transfer} met {each.call.transfers}"
                    clock.after(transfer.seconds, self._end_of_transfer, each)

    def _all_here(self, work: Work, end: Hashable, members: int) -> list[Work]:
        """All members' kernels once `work`, one of them, is the last to start; before that, none."""
        met = self._met.setdefault(end, [])
        met.append(work)
        if len(met) < members:
            return []
        del self._met[end]
        return met

    def _end_of_transfer(self, work: Work) -> None:
        work.open -= 1
        if not work.open:
            self._end(work)

    def _end(self, work: Work) -> None:
        device = work.device
        if work.ended:  # aborted meanwhile
            return
        if device.free_blocks is not None:
            if device.free_blocks < 1 and isinstance(work.call, Compute):
                device.stalled.append(work)
                return
            device.free_blocks += work.blocks
        work.ended = True
        del device.unfinished[work], device.resident[work]
        for other in work.then:
            self._less_missing(other)
        if self._kind.serial:
            self._start_next(device, work.queue)
        if work.blocks and device.free_blocks is not None:
            self._use_room(device)
        self._ended(work)

    def _less_missing(self, work: Work) -> None:
        work.missing -= 1
        if not work.missing and work.device.queues[work.queue][0] is work:
            self._start_next(work.device, work.queue)

    def _use_room(self, device: DeviceState) -> None:
        stalled, device.stalled = device.stalled, []
        for work in stalled:
            self._end(work)
        short, device.short_of_blocks = device.short_of_blocks, set()
        for number in sorted(short):
            self._start_next(device, number)
