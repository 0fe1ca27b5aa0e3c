# SPDX-License-Identifier: Apache-2.0
"""Generate the well-known schedules: GPipe, 1F1B, interleaved 1F1B and the hand-crafted zero-bubble schedules.

The 1F1B and interleaved orders are those of Megatron-core 0.16.1 (`megatron/core/pipeline_parallel/schedules.py`),
action for action. The split orders are the same ones with each weight gradient delayed.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

from adaptra_megatron.schedule.ir import (
    Action,
    Kind,
    MicroBatchCountError,
    Order,
    Schedule,
    ScheduleError,
    require_counts,
    units,
)


def split_backward(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """Return the schedule with each B turned into I and its W put off by `delay` backwards of the same stage.

    `delay` 0 puts W right after its I; None puts all W at the end of the stage. W keep the order of their I, so each
    chunk's weight gradients still accumulate in micro-batch order. Raises ScheduleError if `delay` is negative or
    the schedule splits its backwards already.
    """
    return delay_weights(schedule, [delay] * schedule.stages)


def split_every_other(schedule: Schedule) -> Schedule:
    """Return the schedule with every other B of each chunk, from the first one on, split into I and W, to measure split
    and whole backwards. Those of combined actions stay whole and do not count."""
    orders = tuple(tuple(_every_other_split(order)) for order in schedule.orders)
    return dataclasses.replace(schedule, orders=orders)


def _every_other_split(order: Order) -> Iterator[Action]:
    split: dict[int, bool] = {}
    for unit in units(order):
        whole = unit[0]
        if whole.kind is not Kind.BACKWARD:
            yield from unit
            continue
        split[whole.chunk] = not split.get(whole.chunk, False)
        kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split[whole.chunk] else (Kind.BACKWARD,)
        yield from (whole._replace(kind=kind) for kind in kinds)


def delay_weights(schedule: Schedule, delays: Sequence[int | None]) -> Schedule:
    """Return `split_backward` with one delay per stage."""
    if len(delays) != schedule.stages:
        raise ScheduleError(f"one weight delay per stage is needed: got {len(delays)} for {schedule.stages} stages")
    orders = []
    for stage, (order, delay) in enumerate(zip(schedule.orders, delays, strict=True)):
        if delay is not None and delay < 0:
            raise ScheduleError(
                f"stage {stage}: weight delay {delay} is negative; take 0 for W after its I, or None for W at the end",
                stage=stage,
            )
        orders.append(_split_order(stage, order, delay))
    return dataclasses.replace(schedule, orders=tuple(orders))


def _split_order(stage: int, order: Order, delay: int | None) -> Order:
    actions: list[Action] = []
    pending: deque[Action] = deque()
    for action in order:
        if action.kind is Kind.FORWARD:
            actions.append(action)
            continue
        if action.kind is not Kind.BACKWARD:
            raise ScheduleError(
                f"stage {stage}: {action} is split already; only a schedule of whole backwards can be split",
                stage=stage,
                action=action,
            )
        actions.append(action._replace(kind=Kind.BACKWARD_INPUT))
        pending.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        if delay is not None and len(pending) > delay:
            actions.append(pending.popleft())
    return (*actions, *pending)


def gpipe(stages: int, micro_batches: int, *, chunks: int = 1) -> Schedule:
    """GPipe (arXiv 1811.06965): all forwards, chunk after chunk, then all backwards.

    Backwards run in ascending micro-batch order, so gradients accumulate in the order of every other schedule here.
    """
    require_counts(stages=stages, micro_batches=micro_batches, chunks=chunks)

    def order(stage: int) -> Order:
        forwards = (
            Action(stage, Kind.FORWARD, chunk, micro_batch)
            for chunk in range(chunks)
            for micro_batch in range(micro_batches)
        )
        backwards = (
            Action(stage, Kind.BACKWARD, chunk, micro_batch)
            for chunk in reversed(range(chunks))
            for micro_batch in range(micro_batches)
        )
        return (*forwards, *backwards)

    return _schedule(stages, chunks, micro_batches, [order(stage) for stage in range(stages)])


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """1F1B: what Megatron's `forward_backward_pipelining_without_interleaving` runs.

    Stage `s` runs `min(stages - s - 1, micro_batches)` forwards, then one forward and one backward in turn.
    """
    require_counts(stages=stages, micro_batches=micro_batches)
    table = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    orders = [_one_forward_one_backward(stage, table, 1, stages - stage - 1) for stage in range(stages)]
    return _schedule(stages, 1, micro_batches, orders)


def interleaved(stages: int, micro_batches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B: what Megatron's `forward_backward_pipelining_with_interleaving` runs.

    `group_size` is Megatron's `microbatch_group_size_per_vp_stage`, the micro-batches a stage runs on one chunk before
    it turns to the next chunk; None means Megatron's default, the number of stages. Raises ScheduleError for the
    micro-batch counts and group sizes that Megatron refuses.
    """
    return _interleaved(stages, micro_batches, chunks, group_size, combined=False)


def interleaved_combined(stages: int, micro_batches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B of combined actions: what Megatron runs with `--overlap-moe-expert-parallel-comm`.

    Its warm-up has one more forward than `interleaved`, so that no forward is combined with its own backward. Raises
    ScheduleError as `interleaved`.
    """
    return _interleaved(stages, micro_batches, chunks, group_size, combined=True)


def _interleaved(stages: int, micro_batches: int, chunks: int, group_size: int | None, *, combined: bool) -> Schedule:
    table = _interleaved_table(stages, micro_batches, chunks, group_size)
    least = (chunks - 1) * (stages if group_size is None else group_size) + combined
    orders = [
        _one_forward_one_backward(stage, table, chunks, 2 * (stages - stage - 1) + least, combined)
        for stage in range(stages)
    ]
    return _schedule(stages, chunks, micro_batches, orders)


def stock_order(stages: int, micro_batches: int, chunks: int = 1, group_size: int | None = None) -> Schedule:
    """Return the order that stock Megatron trains with: 1F1B for one chunk per stage, interleaved for more."""
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    return interleaved(stages, micro_batches, chunks, group_size)


def forward_only(stages: int, micro_batches: int, chunks: int = 1, group_size: int | None = None) -> Schedule:
    """Return the order that stock Megatron evaluates with: the forwards of `stock_order`.

    Raises ScheduleError where Megatron refuses to evaluate, which is where it refuses to train.
    """
    if chunks == 1:
        require_counts(stages=stages, micro_batches=micro_batches)
        table = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    else:
        table = _interleaved_table(stages, micro_batches, chunks, group_size)
    orders = [
        tuple(Action(stage, Kind.FORWARD, chunk, micro_batch) for micro_batch, chunk in table)
        for stage in range(stages)
    ]
    return _schedule(stages, chunks, micro_batches, orders)


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1 of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 2.1).

    1F1B whose weight gradients stage `s` puts off by `s` backwards: every stage holds at most `stages` activations,
    1F1B's peak, if nothing is released before the weight gradient. With equal times the bubble is a third of 1F1B's.
    """
    return delay_weights(one_f_one_b(stages, micro_batches), range(stages))


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """ZB-H2 of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 2.2).

    Twice the warm-up of 1F1B, and stage `s` puts its weight gradients off by `2 s` backwards: every stage holds at
    most `2 stages - 1` activations. With equal times and enough micro-batches no stage idles between its first and its
    last action; stage `s` ends `s` forwards later than stage 0, so an optimizer step that synchronises all stages
    sees the makespan of ZB-H1.
    """
    require_counts(stages=stages, micro_batches=micro_batches)
    table = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    orders = [_one_forward_one_backward(stage, table, 1, 2 * (stages - stage - 1)) for stage in range(stages)]
    return delay_weights(_schedule(stages, 1, micro_batches, orders), range(0, 2 * stages, 2))


def interleaved_split(stages: int, micro_batches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B with split backward: ZB-H1's idea on Megatron's interleaved order.

    Stage `s` puts its weight gradients off by `2 s` backwards, which fill the bubbles of its cool-down. Every stage
    then holds as many activations as stage 0 of `interleaved`, and no more. Raises ScheduleError as `interleaved`.
    """
    return delay_weights(interleaved(stages, micro_batches, chunks, group_size), range(0, 2 * stages, 2))


def _one_forward_one_backward(
    stage: int, table: list[tuple[int, int]], chunks: int, warm_up: int, combined: bool = False
) -> Order:
    """Return warm-up forwards, then alternating forwards and backwards (or combined actions), then the remaining
    backwards.

    `table` holds `(micro-batch, chunk)` in forward order. Backwards follow the same table with the chunks mirrored
    (`get_model_chunk_id` in Megatron), because the last chunk's gradient comes first.
    """
    forwards = [Action(stage, Kind.FORWARD, chunk, micro_batch) for micro_batch, chunk in table]
    backwards = [Action(stage, Kind.BACKWARD, chunks - 1 - chunk, micro_batch) for micro_batch, chunk in table]
    warm_up = min(warm_up, len(table))
    steady = len(table) - warm_up
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        order += (forward._replace(combined=combined), backward)
    return (*order, *backwards[steady:])


def check_groups(stages: int, micro_batches: int, chunks: int, group_size: int | None) -> int:
    """Return the size of a group of micro-batches, by Megatron's rules.

    Raises ScheduleError for counts that Megatron refuses, and MicroBatchCountError where Megatron raises a
    RuntimeError.
    """
    require_counts(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if stages < 2 or chunks < 2:
        raise ScheduleError(
            f"an interleaved schedule needs at least 2 stages and 2 chunks per stage, got {stages} and {chunks}: "
            "take 1F1B instead"
        )
    group = stages if group_size is None else group_size
    if not stages <= group <= micro_batches:
        raise ScheduleError(
            f"Megatron's interleaved schedule needs stages <= group size <= micro-batches, got {stages} stages, group "
            f"size {group} and {micro_batches} micro-batches: raise the micro-batches to at least {max(stages, group)}"
            f" or set microbatch_group_size_per_vp_stage between {stages} and the micro-batches"
        )
    remainder = micro_batches % group
    if 0 < remainder < stages:
        raise MicroBatchCountError(
            f"Megatron's interleaved schedule needs micro-batches modulo group size to be 0 or at least the number of "
            f"stages, got {micro_batches} modulo {group} = {remainder} with {stages} stages: take "
            f"{micro_batches - remainder} or {micro_batches - remainder + stages} micro-batches, or another "
            "microbatch_group_size_per_vp_stage"
        )
    return group


def _interleaved_table(stages: int, micro_batches: int, chunks: int, group_size: int | None) -> list[tuple[int, int]]:
    """Return `(micro-batch, chunk)` in forward order, as Megatron's `get_schedule_table`."""
    group = check_groups(stages, micro_batches, chunks, group_size)
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def _schedule(stages: int, chunks: int, micro_batches: int, orders: list[Order]) -> Schedule:
    return Schedule(stages=stages, chunks=chunks, micro_batches=micro_batches, orders=tuple(orders))
