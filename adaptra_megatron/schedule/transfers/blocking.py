# SPDX-License-Identifier: Apache-2.0
"""Simulate stock Megatron-core's schedules: their sends and receives block the stage that calls them.

The programs below are the calls of megatron-core 0.16.1 `pipeline_parallel/schedules.py`,
`forward_backward_pipelining_without_interleaving` and, with `overlap_p2p_comm` off,
`forward_backward_pipelining_with_interleaving`. A call posts all its sends and receives at once and returns when
each of them is complete. A receive exists only from the moment it is posted, so a transfer completes, on both sides,
at max(sent + occupancy + latency, receive posted): csrc/schedule/blocking.cpp replays them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.classic import interleaved, interleaved_combined, one_f_one_b
from adaptra_megatron.schedule.ir import Action, Kind, Schedule, ScheduleError
from adaptra_megatron.schedule.native import encode_action


class BlockingCall(NamedTuple):
    """One call of Megatron's P2PCommunicator: its sends to and receives from the neighbours, at once."""

    send_next: bool = False
    send_previous: bool = False
    receive_next: bool = False
    receive_previous: bool = False


Step = Action | BlockingCall


def stock_programs(schedule: Schedule) -> list[list[Step]]:
    """Return the actions and calls of each stage when stock Megatron runs `schedule`.

    Raises ScheduleError for orders that stock does not run.
    """
    if schedule.chunks == 1:
        _require_one_f_one_b(schedule)
        return [list(_one_f_one_b_program(schedule, stage)) for stage in range(schedule.stages)]
    group = _require_interleaved(schedule)
    return [list(_interleaved_program(schedule, stage, group)) for stage in range(schedule.stages)]


def encoded_programs(schedule: Schedule) -> _native.EncodedOrders:
    """Return the programs of all stages for `_native.replay_blocking`. Raises ScheduleError as `stock_programs`."""
    chunks = schedule.chunks
    return _native.EncodedOrders(
        [
            [_call_code(step) if isinstance(step, BlockingCall) else encode_action(step, chunks) for step in program]
            for program in stock_programs(schedule)
        ]
    )


def _call_code(call: BlockingCall) -> int:
    """Return the code of a call: negative, unlike actions; bit n of its complement is the n-th field of
    `BlockingCall`."""
    return ~sum(1 << bit for bit, wanted in enumerate(call) if wanted)


def _one_f_one_b_program(schedule: Schedule, stage: int) -> Iterator[Step]:
    order = schedule.orders[stage]
    first, last = stage == 0, stage == schedule.stages - 1
    receive_forward, send_forward = BlockingCall(receive_previous=not first), BlockingCall(send_next=not last)
    receive_backward, send_backward = BlockingCall(receive_next=not last), BlockingCall(send_previous=not first)
    warm_up = min(schedule.stages - stage - 1, schedule.micro_batches)
    steady = schedule.micro_batches - warm_up

    for forward in order[:warm_up]:
        yield from (receive_forward, forward, send_forward)
    if steady:
        yield receive_forward
    for index in range(steady):
        forward, backward = order[warm_up + 2 * index : warm_up + 2 * index + 2]
        yield from (forward, BlockingCall(send_next=not last, receive_next=not last), backward)
        yield BlockingCall(send_previous=not first, receive_previous=not first and index + 1 < steady)
    for backward in order[warm_up + 2 * steady :]:
        yield from (receive_backward, backward, send_backward)


def _interleaved_program(schedule: Schedule, stage: int, group: int) -> Iterator[Step]:
    stages, chunks, total = schedule.stages, schedule.chunks, schedule.micro_batches * schedule.chunks
    order = schedule.orders[stage]
    forwards = [action for action in order if action.kind is Kind.FORWARD]
    backwards = [action for action in order if action.kind is Kind.BACKWARD]
    first, last = stage == 0, stage == stages - 1
    warm_up = min(total, 2 * (stages - 1 - stage) + (chunks - 1) * group + schedule.combines)
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

    yield BlockingCall(receive_previous=not first)
    for index in range(warm_up):
        yield forwards[index]
        ends_warm_up = index == warm_up - 1 and steady > 0
        yield BlockingCall(
            send_next=sends_forward(index),
            receive_previous=expects_forward(index),
            receive_next=ends_warm_up and not last,
        )
    for index in range(steady):
        yield from (forwards[warm_up + index], backwards[index])
        yield BlockingCall(
            send_next=sends_forward(warm_up + index),
            send_previous=sends_backward(index),
            receive_previous=index + 1 < steady and expects_forward(warm_up + index),
            receive_next=expects_backward(index),
        )
    if not steady:
        yield BlockingCall(receive_next=not last)
    for index in range(steady, total):
        yield backwards[index]
        yield BlockingCall(send_previous=sends_backward(index), receive_next=expects_backward(index))


def _require_one_f_one_b(schedule: Schedule) -> None:
    if schedule.orders != one_f_one_b(schedule.stages, schedule.micro_batches).orders:
        raise ScheduleError("blocking sends are defined for stock's own order only, and this one is not 1F1B")


def _require_interleaved(schedule: Schedule) -> int:
    """Return the size of a group of micro-batches."""
    if schedule.stages < 3:
        raise ScheduleError(
            "stock runs interleaved schedules with blocking sends (overlap_p2p_comm off) on more than 2 stages only, "
            f"got {schedule.stages}; simulate it without blocking"
        )
    group = next((k for k, action in enumerate(schedule.orders[0]) if action.chunk != 0), schedule.micro_batches)
    stock_order = interleaved_combined if schedule.combines else interleaved
    stock = stock_order(schedule.stages, schedule.micro_batches, schedule.chunks, group)
    if schedule.orders != stock.orders:
        raise ScheduleError(
            "blocking sends are defined for stock's own order only, and this one is not interleaved 1F1B"
        )
    return group
