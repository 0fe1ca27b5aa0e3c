# SPDX-License-Identifier: Apache-2.0
"""Splits whole backwards in an input gradient (I) now and a weight gradient (W) later."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from adaptra_megatron.schedule.actions import Action, Kind, Order, Schedule
from adaptra_megatron.schedule.errors import ScheduleError


def split_backward(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """The schedule with each B turned in I, and its W put `delay` backwards of the same stage later.

    `delay` 0 puts W right after its I; None puts all W at the end of the stage. W keep the order of their I, so each
    chunk's weight gradients still accumulate in micro-batch order. Raises ScheduleError if `delay` is negative or the
    schedule splits its backwards already.
    """
    return delay_weights(schedule, [delay] * schedule.stages)


def split_every_other(schedule: Schedule) -> Schedule:
    """The schedule with the B of micro-batches 0, 2, ... turned in I and W: to measure backwards split and whole."""
    kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    orders = tuple(
        tuple(
            action
            for whole in order
            for action in (
                [whole._replace(kind=kind) for kind in kinds]
                if whole.kind is Kind.BACKWARD and whole.micro_batch % 2 == 0
                else [whole]
            )
        )
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, orders=orders)


def delay_weights(schedule: Schedule, delays: Sequence[int | None]) -> Schedule:
    """`split_backward` with one delay per stage."""
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
