# SPDX-License-Identifier: Apache-2.0
"""What a fixed order costs where all transfers of a stage wait behind each other: head-of-line blocking.

Megatron's point-to-point transfers of a pipeline share one NCCL communicator, and a communicator executes on one stream
of each device: its transfers run one after another in the order in which the stage issued them, to and from whichever
neighbour (pytorch issues 175225 and 172668). Here every stage issues its sends and receives in the order in which they
would happen on healthy links. A transfer begins when it is the next one at both ends and its content has been computed,
and holds both ends until it has arrived. Computing waits for what it needs and for nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.simulator import Simulation, peak_in_flight, simulate

_Result = tuple[bool, int, int]
"""What an action needs and makes: whether it is an activation, the virtual stage that makes it, the micro-batch."""


class _Transfer(NamedTuple):
    """One message, from its making to its arrival at another stage."""

    healthy_s: float
    """When it would be sent on healthy links."""
    result: _Result
    source: int
    target: int


def simulate_in_stream_order(schedule: Schedule, costs: Costs) -> Simulation:
    """Replay the fixed orders of `schedule` with one queue of transfers per stage; caps are not enforced.

    Raises SimulationError as `simulate` does for orders that do not fit `costs` or wait on each other for ever.
    """
    healthy = simulate(schedule, dataclasses.replace(costs, links={}))
    replay = _Replay(schedule, costs, _transfers(schedule, healthy))
    replay.run()
    return Simulation(
        schedule=schedule,
        makespan_s=max((ends[-1] for ends in replay.end_s if ends), default=0.0),
        start_s=tuple(map(tuple, replay.start_s)),
        end_s=tuple(map(tuple, replay.end_s)),
        peak_in_flight=peak_in_flight(schedule, costs.released_at_backward_input),
    )


def _transfers(schedule: Schedule, healthy: Simulation) -> list[_Transfer]:
    """In the one order that all stages issue them in, so that no two ends wait for each other."""
    found = []
    for order, ends in zip(schedule.orders, healthy.end_s, strict=True):
        for action, end_s in zip(order, ends, strict=True):
            made = _made_by(action, schedule)
            if made is None:
                continue
            forward, position, _ = made
            target = schedule.placement.stage_of[position + (1 if forward else -1)]
            found.append(_Transfer(end_s, made, action.stage, target))
    return sorted(found)


def _made_by(action: Action, schedule: Schedule) -> _Result | None:
    """What `action` makes for another stage."""
    position = schedule.placement.virtual_stage(action.stage, action.chunk)
    if action.kind is Kind.FORWARD and position + 1 < schedule.virtual_stages and schedule.stages > 1:
        return (True, position, action.micro_batch)
    if action.kind.sends_gradient and position > 0 and schedule.stages > 1:
        return (False, position, action.micro_batch)
    return None


def _needed_by(action: Action, schedule: Schedule) -> _Result | None:
    """What `action` needs of another stage."""
    position = schedule.placement.virtual_stage(action.stage, action.chunk)
    if action.kind is Kind.FORWARD and position > 0 and schedule.stages > 1:
        return (True, position - 1, action.micro_batch)
    if action.kind.sends_gradient and position + 1 < schedule.virtual_stages and schedule.stages > 1:
        return (False, position + 1, action.micro_batch)
    return None


class _Replay:
    """Stages and queues advance in turn until nothing can."""

    def __init__(self, schedule: Schedule, costs: Costs, transfers: Sequence[_Transfer]) -> None:
        self.schedule, self.costs = schedule, costs
        self.start_s: list[list[float]] = [[] for _ in schedule.orders]
        self.end_s: list[list[float]] = [[] for _ in schedule.orders]
        self._now_s = [0.0] * schedule.stages
        self._free_s = [0.0] * schedule.stages
        self._made_s: dict[_Result, float] = {}
        self._arrived_s: dict[_Result, float] = {}
        self._queues = [
            [transfer for transfer in transfers if stage in (transfer.source, transfer.target)]
            for stage in range(schedule.stages)
        ]
        self._next = [0] * schedule.stages

    def run(self) -> None:
        """To the end: the orders run on healthy links, and every stage issues its transfers in that order."""
        moved = True
        while moved:
            computed = [self._compute(stage) for stage in range(self.schedule.stages)]
            transferred = [self._transfer(stage) for stage in range(self.schedule.stages)]
            moved = any(computed) or any(transferred)
        done = all(len(ends) == len(order) for ends, order in zip(self.end_s, self.schedule.orders, strict=True))
        assert done, "transfers in one common order cannot deadlock"

    def _compute(self, stage: int) -> bool:
        """Run what `stage` can; whether it was anything."""
        order, done = self.schedule.orders[stage], len(self.end_s[stage])
        for action in order[done:]:
            needed = _needed_by(action, self.schedule)
            if needed is not None and needed not in self._arrived_s:
                break
            start_s = max(self._now_s[stage], 0.0 if needed is None else self._arrived_s[needed])
            self._now_s[stage] = start_s + self._lasts_s(action)
            self.start_s[stage].append(start_s)
            self.end_s[stage].append(self._now_s[stage])
            made = _made_by(action, self.schedule)
            if made is not None:
                self._made_s[made] = self._now_s[stage]
        return len(self.end_s[stage]) > done

    def _lasts_s(self, action: Action) -> float:
        table = {
            Kind.FORWARD: self.costs.forward_s,
            Kind.BACKWARD: self.costs.whole_backward_s,
            Kind.BACKWARD_INPUT: self.costs.backward_input_s,
            Kind.BACKWARD_WEIGHT: self.costs.backward_weight_s,
        }
        return table[action.kind][action.stage][action.chunk]

    def _transfer(self, stage: int) -> bool:
        """Carry what is next in the queue of `stage` and of the other end; whether it was anything."""
        carried = False
        while self._next[stage] < len(self._queues[stage]):
            transfer = self._queues[stage][self._next[stage]]
            source, target = transfer.source, transfer.target
            other = target if stage == source else source
            if self._queues[other][self._next[other]] is not transfer or transfer.result not in self._made_s:
                break
            cost = self.costs.link(source, target)
            start_s = max(self._made_s[transfer.result], self._free_s[source], self._free_s[target])
            arrival_s = start_s + cost.occupancy_s + cost.latency_s
            self._free_s[source] = self._free_s[target] = self._arrived_s[transfer.result] = arrival_s
            self._next[source] += 1
            self._next[target] += 1
            carried = True
        return carried
