# SPDX-License-Identifier: Apache-2.0
"""A slow, obvious model of GPUs that send over rendezvous links: the oracle of the native device replay.

Hosts issue operations, devices start and end them, one moment after the other; nothing is computed ahead of time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from reference_simulator import Links, Result, Times, needed, produced, sent_s, unit_s

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule, units
from adaptra_megatron.schedule.transfers.launch_order import LaunchRanks, OrderedMessage, receives_before
from adaptra_megatron.schedule.transfers.launch_order import needed as message_for
from adaptra_megatron.schedule.transfers.launch_order import produced as message_of


@dataclass(eq=False)
class _Operation:
    """A kernel, or one end of a transfer."""

    stage: int
    stream: tuple[str, int]
    work: Order | OrderedMessage
    """What runs as one, or the message."""
    after: list[_Operation] = field(default_factory=list)
    """What must have ended."""
    started: bool = False
    sent: bool = False
    """Whether the messages of a computation have left."""
    ended: bool = False
    made_by: _Operation | None = None
    """Computation whose message this is the sending end of."""


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
        self.events: list[tuple[float, int, list[_Operation] | _Operation | Result]] = []
        self.sequence = itertools.count()

    def _program(self, stage: int, ranks: LaunchRanks) -> list[Order | tuple[str, OrderedMessage]]:
        """What the host of `stage` issues, in order."""
        found: list[Order | tuple[str, OrderedMessage]] = []
        postings = iter(receives_before(self.schedule, stage, ranks))
        for unit in units(self.schedule.orders[stage]):
            receives = [message for _ in unit for message in next(postings).before]
            found += [("receive", message) for message in receives if self._is_rendezvous(message)]
            found.append(unit)
            for message in (message_of(action, self.schedule.placement) for action in unit):
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

    def _happen(self, event: list[_Operation] | _Operation | Result, now_s: float) -> None:
        if isinstance(event, tuple):
            self.arrived.add(event)
        elif isinstance(event, _Operation):
            event.sent = True
            for action in event.work:
                self._sent(action, now_s)
        else:
            for operation in event:
                operation.ended = True
                if not isinstance(operation.work, OrderedMessage):
                    self.end_s[operation.stage] += [now_s] * len(operation.work)

    def _sent(self, action: Action, now_s: float) -> None:
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

    def _operation(self, stage: int, step: Order | tuple[str, OrderedMessage]) -> _Operation | None:
        computation = self.latest.get((stage, ("compute", stage)))
        if isinstance(step[0], Action):
            operation = _Operation(stage, ("compute", stage), step)
            for action in step:
                message = message_for(action, self.schedule.placement)
                if self._is_rendezvous(message):
                    assert message is not None
                    operation.after.append(self.ends[stage, message])
                elif needed(action, self.schedule.placement) not in self.arrived and not self._is_made_here(action):
                    return None
            return operation
        what, message = step
        peer = message.source if what == "receive" else message.target
        operation = _Operation(stage, (what, peer), message)
        if what == "send":
            operation.made_by = computation
        elif computation is not None:
            operation.after.append(computation)
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
            while queue and all(other.ended for other in queue[0].after) and self._is_made(queue[0]):
                operation = queue.popleft()
                operation.started = started = True
                if isinstance(operation.work, OrderedMessage):
                    self._meet(operation.work, now_s)
                else:
                    self.start_s[operation.stage] += [now_s] * len(operation.work)
                    self._at(sent_s(self.costs, operation.work, now_s), operation)
                    self._at(now_s + unit_s(self.costs, operation.work), [operation])
        return started

    @staticmethod
    def _is_made(operation: _Operation) -> bool:
        return operation.made_by is None or operation.made_by.sent

    def _meet(self, message: OrderedMessage, now_s: float) -> None:
        ends = [self.ends.get((stage, message)) for stage in (message.source, message.target)]
        both = [operation for operation in ends if operation is not None and operation.started]
        if len(both) == 2:
            cost = self.costs.link(message.source, message.target)
            self._at(now_s + (cost.occupancy_s + cost.latency_s), both)

    def _at(self, moment_s: float, event: list[_Operation] | _Operation) -> None:
        heapq.heappush(self.events, (moment_s, next(self.sequence), event))
