# SPDX-License-Identifier: Apache-2.0
"""Valid schedules of many kinds, for property tests."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st

from adaptra_megatron.schedule.classic import split_backward
from adaptra_megatron.schedule.ir import (
    Action,
    Kind,
    Order,
    Placement,
    Schedule,
    ScheduleError,
    interleaved,
    v_shape,
)
from adaptra_megatron.schedule.order_registry import SCHEDULES, make_schedule, names_for
from adaptra_megatron.schedule.schedule_checks import check_schedule

PLACED_AS_MEGATRON = {
    name for name, named in SCHEDULES.items() if make_schedule(name, 2, 2, named.chunks[0]).custom_placement is None
}


@st.composite
def named_schedules(draw: st.DrawFn, *, least_stages: int = 1) -> Schedule:
    """Orders that have a name and Megatron's placement; whole ones as they are or with weight gradients put off."""
    chunks = draw(st.integers(1, 3))
    stages = draw(st.integers(max(least_stages, min(chunks, 2)), 5))
    micro_batches = stages * draw(st.integers(1, 3)) if chunks > 1 else draw(st.integers(1, 7))
    name = draw(st.sampled_from([name for name in names_for(chunks) if name in PLACED_AS_MEGATRON]))
    schedule = make_schedule(name, stages, micro_batches, chunks)
    delay = draw(st.integers(0, 3) | st.none())
    return schedule if schedule.splits_backward or draw(st.booleans()) else split_backward(schedule, delay)


@st.composite
def random_schedules(draw: st.DrawFn, *, placed: bool = False) -> Schedule:
    """Orders that no generator would write: a random run of the pipeline, some backwards whole and some split.

    A stage takes any action that its neighbours' actions so far allow, so it cannot deadlock. `placed`: virtual stages
    may be on any stages.
    """
    stages, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    placement = draw(random_placements(stages, chunks)) if placed else interleaved(stages, chunks)
    schedule = random_run(placement, draw(st.integers(1, 5)), random.Random(draw(st.integers(0, 2**32))))
    check_schedule(schedule)
    return schedule


def with_pairs(schedule: Schedule, choice: random.Random) -> Schedule:
    """`schedule` with half of its forwards that a backward follows marked as combined, whether that can run or not."""

    def marked(order: Order) -> Order:
        behind = (*order[1:], None)
        return tuple(
            action._replace(combined=choice.random() < 0.5)
            if action.kind is Kind.FORWARD and other is not None and other.kind.sends_gradient
            else action
            for action, other in zip(order, behind, strict=True)
        )

    return replace(schedule, orders=tuple(map(marked, schedule.orders)))


def with_pairs_that_run(schedule: Schedule, choice: random.Random) -> Schedule:
    """`with_pairs`, less the pairs that wait for ever."""
    wanted = with_pairs(schedule, choice)
    for stage, order in enumerate(wanted.orders):
        for place, action in enumerate(order):
            if action.combined:
                tried = [list(each) for each in schedule.orders]
                tried[stage][place] = action
                with suppress(ScheduleError):
                    check_schedule(candidate := replace(schedule, orders=tuple(map(tuple, tried))))
                    schedule = candidate
    return schedule


@st.composite
def combined_schedules(draw: st.DrawFn, *, placed: bool = False) -> Schedule:
    """Random schedules that can run, some with combined actions."""
    schedule = draw(random_schedules(placed=placed))
    return with_pairs_that_run(schedule, random.Random(draw(st.integers(0, 2**32))))


def random_placements(stages: int, chunks: int) -> st.SearchStrategy[Placement]:
    """Megatron's placement, the V, and any other."""
    others = st.permutations(interleaved(stages, chunks).stage_of).map(lambda stage_of: Placement(tuple(stage_of)))
    return st.one_of(st.sampled_from([interleaved(stages, chunks), v_shape(stages, chunks)]), others)


def random_run(placement: Placement, micro_batches: int, choice: random.Random) -> Schedule:
    """A random run of the pipeline: a valid schedule that may hold any number of activations."""
    stages, chunks = placement.stages, placement.chunks
    last = stages * chunks - 1
    positions = range(last + 1)
    forwards, backwards, weights = ([0] * (last + 1) for _ in range(3))
    orders: list[list[Action]] = [[] for _ in range(stages)]

    def possible(position: int) -> list[Kind]:
        kinds = []
        if forwards[position] < (micro_batches if position == 0 else forwards[position - 1]):
            kinds.append(Kind.FORWARD)
        if backwards[position] < (forwards[last] if position == last else backwards[position + 1]):
            kinds.append(Kind.BACKWARD_INPUT)
            if weights[position] == backwards[position]:  # a whole backward may not overtake weight gradients
                kinds.append(Kind.BACKWARD)
        if weights[position] < backwards[position]:
            kinds.append(Kind.BACKWARD_WEIGHT)
        return kinds

    while options := [(position, kind) for position in positions for kind in possible(position)]:
        position, kind = choice.choice(options)
        counts = {Kind.FORWARD: forwards, Kind.BACKWARD_WEIGHT: weights}.get(kind, backwards)
        stage, chunk = placement.places[position]
        orders[stage].append(Action(stage, kind, chunk, counts[position]))
        counts[position] += 1
        if kind is Kind.BACKWARD:
            weights[position] += 1
    finished: tuple[Order, ...] = tuple(map(tuple, orders))
    return Schedule(
        stages=stages, chunks=chunks, micro_batches=micro_batches, orders=finished, custom_placement=placement
    )
