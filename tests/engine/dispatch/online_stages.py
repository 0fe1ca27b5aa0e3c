# SPDX-License-Identifier: Apache-2.0
"""Stages that dispatch online, or run the plan, simulated over links that delay each message as they like."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection

from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep, compile_program
from adaptra_megatron.engine.online_order import OnlineOrder
from adaptra_megatron.schedule.ir import Action, Schedule
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage

Delay = Callable[[OrderedMessage], float]
Duration = Callable[[Action], float]


class SimulatedStages:
    """One iteration. Links deliver in the order in which they were given messages."""

    def __init__(
        self,
        schedule: Schedule,
        caps: tuple[float | None, ...],
        released: float,
        *,
        online: Collection[int],
        blind: Collection[int] = (),
        delay_s: Delay,
        duration_s: Duration,
    ) -> None:
        """`online`: stages that are. `blind`: those of them that cannot see arrivals, so wait as the plan says."""
        self._programs = [compile_program(schedule, stage) for stage in range(schedule.stages)]
        self._orders = {stage: OnlineOrder(self._programs[stage], caps[stage], released) for stage in online}
        self._blind = blind
        self._delay_s, self._duration_s = delay_s, duration_s
        self._arrived: list[set[OrderedMessage]] = [set() for _ in self._programs]
        self._link_s: dict[tuple[int, int], float] = defaultdict(float)
        self._busy = [False] * schedule.stages
        self._events: list[tuple[float, int, int, OrderedMessage | None]] = []
        self._sequence = itertools.count()
        self.ran: list[list[ProgramStep]] = [[] for _ in self._programs]
        self.sent: dict[tuple[int, int], list[OrderedMessage]] = defaultdict(list)
        """By directed link, in order."""
        self.makespan_s = 0.0

    def run(self) -> bool:
        """Return whether every stage finished."""
        for stage in range(len(self._programs)):
            self._start(stage, 0.0)
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] <= now_s:
                _, _, stage, message = heapq.heappop(self._events)
                if message is None:
                    self._busy[stage] = False
                else:
                    self._arrived[stage].add(message)
            self.makespan_s = now_s
            for stage in range(len(self._programs)):
                self._start(stage, now_s)
        return all(len(ran) == len(program.steps) for ran, program in zip(self.ran, self._programs, strict=True))

    def _start(self, stage: int, now_s: float) -> None:
        if self._busy[stage]:
            return
        step = self._choice(stage, self._programs[stage])
        if step is None:
            return
        self._busy[stage] = True
        self.ran[stage].append(step)
        end_s = now_s + self._duration_s(step.action)
        heapq.heappush(self._events, (end_s, next(self._sequence), stage, None))
        if step.send is not None:
            link = (step.send.source, step.send.target)
            self.sent[link].append(step.send)
            self._link_s[link] = max(self._link_s[link], end_s + self._delay_s(step.send))
            heapq.heappush(self._events, (self._link_s[link], next(self._sequence), link[1], step.send))

    def _choice(self, stage: int, program: Program) -> ProgramStep | None:
        arrived = self._arrived[stage]
        order = self._orders.get(stage)
        if order is None:
            left = program.steps[len(self.ran[stage]) :]
            return left[0] if left and (left[0].receive is None or left[0].receive in arrived) else None
        if order.finished:
            return None
        step = order.next(lambda message: stage not in self._blind and message in arrived)
        if step is None and stage in self._blind:
            planned = order.planned()
            step = planned if planned.receive is None or planned.receive in arrived else None
        if step is not None:
            order.take(step)
        return step
