# SPDX-License-Identifier: Apache-2.0
"""What stock Megatron-core's schedules cost: their sends and receives block the stage that calls them.

The programs below are the calls of megatron-core 0.16.1 `pipeline_parallel/schedules.py`,
`forward_backward_pipelining_without_interleaving` and, with `overlap_p2p_comm` off,
`forward_backward_pipelining_with_interleaving`. A call posts all its sends and receives at once and returns when
each of them is complete. A receive exists only from the moment it is posted, so a transfer completes, on both sides,
at max(sent + occupancy + latency, receive posted).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from adaptra_megatron.schedule.actions import Action, Kind, Schedule
from adaptra_megatron.schedule.classic import interleaved, one_f_one_b
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.errors import ScheduleError

Times = list[list[float]]


class Call(NamedTuple):
    """One call of Megatron's P2PCommunicator: what it sends to and receives from the neighbours, all at once."""

    send_next: bool = False
    send_previous: bool = False
    receive_next: bool = False
    receive_previous: bool = False


Step = Action | Call


def replay_blocking(schedule: Schedule, costs: Costs) -> tuple[Times, Times]:
    """Start and end seconds of each action under stock's blocking calls.

    Raises ScheduleError if `schedule` is not one that stock runs: the calls of any other order are not defined.
    """
    if schedule.chunks == 1:
        programs = [list(_one_f_one_b_program(schedule, stage)) for stage in range(schedule.stages)]
    else:
        programs = [list(_interleaved_program(schedule, stage)) for stage in range(schedule.stages)]
    return _Replay(schedule, costs, programs).run()


def _one_f_one_b_program(schedule: Schedule, stage: int) -> Iterator[Step]:
    if schedule.orders != one_f_one_b(schedule.stages, schedule.micro_batches).orders:
        raise ScheduleError("blocking sends are defined for stock's own order only, and this one is not 1F1B")
    order = schedule.orders[stage]
    first, last = stage == 0, stage == schedule.stages - 1
    receive_forward, send_forward = Call(receive_previous=not first), Call(send_next=not last)
    receive_backward, send_backward = Call(receive_next=not last), Call(send_previous=not first)
    warm_up = min(schedule.stages - stage - 1, schedule.micro_batches)
    steady = schedule.micro_batches - warm_up

    for forward in order[:warm_up]:
        yield from (receive_forward, forward, send_forward)
    if steady:
        yield receive_forward
    for index in range(steady):
        forward, backward = order[warm_up + 2 * index : warm_up + 2 * index + 2]
        yield from (forward, Call(send_next=not last, receive_next=not last), backward)
        yield Call(send_previous=not first, receive_previous=not first and index + 1 < steady)
    for backward in order[warm_up + 2 * steady :]:
        yield from (receive_backward, backward, send_backward)


def _interleaved_program(schedule: Schedule, stage: int) -> Iterator[Step]:
    stages, chunks, total = schedule.stages, schedule.chunks, schedule.micro_batches * schedule.chunks
    _require_interleaved(schedule)
    order = schedule.orders[stage]
    forwards = [action for action in order if action.kind is Kind.FORWARD]
    backwards = [action for action in order if action.kind is Kind.BACKWARD]
    first, last = stage == 0, stage == stages - 1
    warm_up = next(index for index, action in enumerate(order) if action.kind is Kind.BACKWARD)
    warm_up = warm_up if warm_up == total else warm_up - 1
    steady = total - warm_up

    def sends_forward(index: int) -> bool:
        return not (last and forwards[index].chunk == chunks - 1)

    def sends_backward(index: int) -> bool:
        return not (first and backwards[index].chunk == 0)

    def expects_forward(index: int) -> bool:
        # Megatron's recv_tensor_from_previous_stage: the first rank is stages - 1 steps ahead of the last one.
        if index + 1 == total or not first:
            return index + 1 < total
        return index >= stages - 1 and forwards[index - (stages - 1)].chunk != chunks - 1

    def expects_backward(index: int) -> bool:
        if index + 1 == total or not last:
            return index + 1 < total
        return index >= stages - 1 and backwards[index - (stages - 1)].chunk != 0

    yield Call(receive_previous=not first)
    for index in range(warm_up):
        yield forwards[index]
        ends_warm_up = index == warm_up - 1 and steady > 0
        yield Call(
            send_next=sends_forward(index),
            receive_previous=expects_forward(index),
            receive_next=ends_warm_up and not last,
        )
    for index in range(steady):
        yield from (forwards[warm_up + index], backwards[index])
        yield Call(
            send_next=sends_forward(warm_up + index),
            send_previous=sends_backward(index),
            receive_previous=index + 1 < steady and expects_forward(warm_up + index),
            receive_next=expects_backward(index),
        )
    if not steady:
        yield Call(receive_next=not last)
    for index in range(steady, total):
        yield backwards[index]
        yield Call(send_previous=sends_backward(index), receive_next=expects_backward(index))


def _require_interleaved(schedule: Schedule) -> None:
    if schedule.stages < 3:
        raise ScheduleError(
            "stock runs interleaved schedules with blocking sends (overlap_p2p_comm off) on more than 2 stages only, "
            f"got {schedule.stages}; simulate it without blocking"
        )
    group = next((k for k, action in enumerate(schedule.orders[0]) if action.chunk != 0), schedule.micro_batches)
    stock = interleaved(schedule.stages, schedule.micro_batches, schedule.chunks, group)
    if schedule.orders != stock.orders:
        raise ScheduleError(
            "blocking sends are defined for stock's own order only, and this one is not interleaved 1F1B"
        )


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
            if isinstance(step, Call):
                self._post(stage, step)
                posted = True
            else:
                self._compute(stage, step)

    def _compute(self, stage: int, action: Action) -> None:
        table = self.costs.forward_s if action.kind is Kind.FORWARD else self.costs.backward_s
        self.start_s[stage].append(self.now[stage])
        self.now[stage] += table[stage][action.chunk]
        self.end_s[stage].append(self.now[stage])

    def _post(self, stage: int, call: Call) -> None:
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
