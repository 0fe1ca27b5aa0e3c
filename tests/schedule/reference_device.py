# SPDX-License-Identifier: Apache-2.0
"""A slow, obvious model of GPUs that send over rendezvous links: the oracle of the native device replay.

Hosts issue operations, devices start and end them, one moment after the other; nothing is computed ahead of time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from reference_simulator import Links, Result, Times, duration, needed, produced

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.transfers.launch_order import LaunchRanks, OrderedMessage, receives_before
from adaptra_megatron.schedule.transfers.launch_order import needed as message_for
from adaptra_megatron.schedule.transfers.launch_order import produced as message_of


@dataclass(eq=False)
class _Operation:
    """A kernel, or one end of a transfer."""

    stage: int
    stream: tuple[str, int]
    work: Action | OrderedMessage
    after: list[_Operation] = field(default_factory=list)
    """What must have ended."""
    started: bool = False
    ended: bool = False


class DeviceReference:
    """One iteration of `schedule`, with receives posted by `ranks`."""

    def __init__(self, schedule: Schedule, costs: Costs, ranks: LaunchRanks) -> None:
        self.schedule, self.costs = schedule, costs
        self.programs = [deque(self._program(stage, ranks)) for stage in range(schedule.stages)]
        self.queues: list[dict[object, deque[_Operation]]] = [{} for _ in range(schedule.stages)]
        self.latest: dict[tuple[int, tuple[str, int]], _Operation] = {}
        self.last: dict[int, _Operation] = {}
        self.ends: dict[tuple[int, OrderedMessage], _Operation] = {}
        self.arrived: set[Result] = {(Kind.FORWARD, 0, m) for m in range(schedule.micro_batches)}
        self.links = Links(costs)
        self.start_s: Times = [[] for _ in range(schedule.stages)]
        self.end_s: Times = [[] for _ in range(schedule.stages)]
        self.events: list[tuple[float, int, list[_Operation] | Result]] = []
        self.sequence = itertools.count()

    def _program(self, stage: int, ranks: LaunchRanks) -> list[Action | tuple[str, OrderedMessage]]:
        """What the host of `stage` issues, in order."""
        found: list[Action | tuple[str, OrderedMessage]] = []
        batches = receives_before(self.schedule, stage, ranks)
        for action, receives in zip(self.schedule.orders[stage], batches, strict=True):
            found += [("receive", message) for message in receives if self._is_rendezvous(message)]
            found.append(action)
            message = message_of(action, self.schedule.placement)
            if self._is_rendezvous(message):
                assert message is not None
                found.append(("send", message))
        return found

    def _is_rendezvous(self, message: OrderedMessage | None) -> bool:
        return message is not None and self.costs.link(message.source, message.target).rendezvous

    def run(self) -> tuple[Times, Times]:
        """Start and end seconds of each action."""
        now_s = 0.0
        while True:
            while self._issue() or self._start(now_s):
                pass
            if not self.events:
                break
            now_s = self.events[0][0]
            while self.events and self.events[0][0] == now_s:
                self._happen(heapq.heappop(self.events)[2], now_s)
        assert not any(self.programs), "receives by rank never deadlock"
        return self.start_s, self.end_s

    def _happen(self, event: list[_Operation] | Result, now_s: float) -> None:
        if isinstance(event, tuple):
            self.arrived.add(event)
            return
        for operation in event:
            operation.ended = True
            if isinstance(operation.work, Action):
                self._ended(operation.work, now_s)

    def _ended(self, action: Action, now_s: float) -> None:
        self.end_s[action.stage].append(now_s)
        away = message_of(action, self.schedule.placement)
        for result in produced(action, self.schedule.placement):
            if self.schedule.placement.stage_of[result[1]] != action.stage and self._is_rendezvous(away):
                continue
            arrival_s = self.links.arrival(action.stage, result, now_s)
            if arrival_s == now_s:
                self.arrived.add(result)
            else:
                heapq.heappush(self.events, (arrival_s, next(self.sequence), result))

    def _issue(self) -> bool:
        """What hosts can launch now; they wait only for messages that do not come over rendezvous links."""
        issued = False
        for stage, program in enumerate(self.programs):
            while program:
                step = program[0]
                operation = self._operation(stage, step)
                if operation is None:
                    break
                program.popleft()
                if before := self.latest.get((stage, operation.stream)):
                    operation.after.append(before)
                if self.costs.serial_queue and (in_front := self.last.get(stage)):
                    operation.after.append(in_front)
                self.last[stage] = operation
                self.latest[stage, operation.stream] = operation
                queue = "the only one" if self.costs.shared_queue else operation.stream
                self.queues[stage].setdefault(queue, deque()).append(operation)
                issued = True
        return issued

    def _operation(self, stage: int, step: Action | tuple[str, OrderedMessage]) -> _Operation | None:
        computation = self.latest.get((stage, ("compute", stage)))
        if isinstance(step, Action):
            message = message_for(step, self.schedule.placement)
            operation = _Operation(stage, ("compute", stage), step)
            if self._is_rendezvous(message):
                assert message is not None
                operation.after.append(self.ends[stage, message])
            elif needed(step, self.schedule.placement) not in self.arrived and not self._is_made_here(step):
                return None
            return operation
        what, message = step
        peer = message.source if what == "receive" else message.target
        operation = _Operation(stage, (what, peer), message, [] if computation is None else [computation])
        self.ends[stage, message] = operation
        return operation

    def _is_made_here(self, action: Action) -> bool:
        """Return whether the same stream has computed what `action` needs, by the time it comes to it."""
        message = message_for(action, self.schedule.placement)
        return message is None or message.source == action.stage

    def _start(self, now_s: float) -> bool:
        """What devices start now; in each queue, nothing starts before what stands in front of it."""
        started = False
        for queue in [queue for queues in self.queues for queue in queues.values()]:
            while queue and all(other.ended for other in queue[0].after):
                operation = queue.popleft()
                operation.started = started = True
                if isinstance(operation.work, Action):
                    self.start_s[operation.stage].append(now_s)
                    end_s = now_s + duration(self.costs, operation.work)
                    self._end_at(end_s, [operation])
                else:
                    self._meet(operation.work, now_s)
        return started

    def _meet(self, message: OrderedMessage, now_s: float) -> None:
        ends = [self.ends.get((stage, message)) for stage in (message.source, message.target)]
        both = [operation for operation in ends if operation is not None and operation.started]
        if len(both) == 2:
            cost = self.costs.link(message.source, message.target)
            self._end_at(now_s + (cost.occupancy_s + cost.latency_s), both)

    def _end_at(self, end_s: float, operations: list[_Operation]) -> None:
        heapq.heappush(self.events, (end_s, next(self.sequence), operations))
