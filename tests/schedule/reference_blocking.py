# SPDX-License-Identifier: Apache-2.0
"""A slow, obvious replay of stock's blocking calls: the oracle of the native one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from reference_simulator import unit_s

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Schedule
from adaptra_megatron.schedule.transfers.blocking import BlockingCall, Step, stock_programs

Times = list[list[float]]


def replay_blocking(schedule: Schedule, costs: Costs) -> tuple[Times, Times]:
    """Start and end seconds of each action."""
    return _Replay(schedule, costs, stock_programs(schedule)).run()


class _Transfer:
    """One message: when it would be delivered, and when its receiver asked for it."""

    __slots__ = ("delivered", "posted")

    def __init__(self) -> None:
        self.delivered: float | None = None
        self.posted: float | None = None

    @property
    def completed(self) -> float | None:
        if self.delivered is None or self.posted is None:
            return None
        return max(self.delivered, self.posted)


class _Replay:
    """Runs the programs; the n-th receive from a link takes the n-th message sent on it."""

    def __init__(self, schedule: Schedule, costs: Costs, programs: Sequence[Sequence[Step]]) -> None:
        stages = schedule.stages
        self.stages = stages
        self.costs = costs
        self.programs = programs
        self.position = [0] * stages
        self.now = [0.0] * stages
        self.waiting: list[list[_Transfer]] = [[] for _ in range(stages)]
        # A direction of travel is +1 (activations) or -1 (gradients); with two stages both use the same link.
        self.transfers: dict[tuple[int, int], list[_Transfer]] = {
            (stage, direction): [] for stage in range(stages) for direction in (1, -1)
        }
        self.sent = dict.fromkeys(self.transfers, 0)
        self.received = dict.fromkeys(self.transfers, 0)
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.start_s: Times = [[] for _ in range(stages)]
        self.end_s: Times = [[] for _ in range(stages)]

    def run(self) -> tuple[Times, Times]:
        pending = deque(range(self.stages))
        while pending:
            stage = pending.popleft()
            if self._advance(stage):
                pending.extend(((stage - 1) % self.stages, (stage + 1) % self.stages))
        for stage, program in enumerate(self.programs):
            assert self.position[stage] == len(program), "stock's own programs cannot deadlock"
        return self.start_s, self.end_s

    def _advance(self, stage: int) -> bool:
        """Run `stage` until it must wait; whether it did anything its neighbours may wait for."""
        posted = False
        while True:
            completions = [transfer.completed for transfer in self.waiting[stage]]
            if None in completions:
                return posted
            self.now[stage] = max([self.now[stage], *(time for time in completions if time is not None)])
            self.waiting[stage] = []
            if self.position[stage] == len(self.programs[stage]):
                return posted
            step = self.programs[stage][self.position[stage]]
            self.position[stage] += 1
            if isinstance(step, BlockingCall):
                self._post(stage, step)
                posted = True
            elif step.combined:
                self._compute(stage, step, self.programs[stage][self.position[stage]])
                self.position[stage] += 1
            else:
                self._compute(stage, step)

    def _compute(self, stage: int, *unit: Action) -> None:
        self.start_s[stage] += [self.now[stage]] * len(unit)
        self.now[stage] += unit_s(self.costs, unit)
        self.end_s[stage] += [self.now[stage]] * len(unit)

    def _post(self, stage: int, call: BlockingCall) -> None:
        now = self.now[stage]
        for wanted, direction in ((call.send_previous, -1), (call.send_next, 1)):
            if wanted:
                target = (stage + direction) % self.stages
                cost = self.costs.link(stage, target)
                start = max(now, self.link_free_s.get((stage, target), 0.0))
                self.link_free_s[stage, target] = start + cost.occupancy_s
                transfer = self._next(self.sent, (stage, direction))
                transfer.delivered = start + cost.occupancy_s + cost.latency_s
                self.waiting[stage].append(transfer)
        for wanted, direction in ((call.receive_previous, 1), (call.receive_next, -1)):
            if wanted:
                transfer = self._next(self.received, ((stage - direction) % self.stages, direction))
                transfer.posted = now
                self.waiting[stage].append(transfer)

    def _next(self, counter: dict[tuple[int, int], int], key: tuple[int, int]) -> _Transfer:
        index = counter[key]
        counter[key] += 1
        if index == len(self.transfers[key]):
            self.transfers[key].append(_Transfer())
        return self.transfers[key][index]
