# SPDX-License-Identifier: Apache-2.0
"""Valid schedules of many kinds, for property tests."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from adaptra_megatron.schedule.actions import Action, Kind, Order, Schedule
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.classic import gpipe, stock_order
from adaptra_megatron.schedule.split import split_backward


@st.composite
def classic_schedules(draw: st.DrawFn, *, least_stages: int = 1) -> Schedule:
    """GPipe, 1F1B and interleaved 1F1B, whole or with weight gradients put off by some backwards."""
    stages, chunks = draw(st.integers(least_stages, 5)), draw(st.integers(1, 3))
    if draw(st.booleans()) and (chunks == 1 or stages > 1):
        schedule = stock_order(stages, stages * draw(st.integers(1, 3)), chunks)
    else:
        schedule = gpipe(stages, draw(st.integers(1, 7)), chunks=chunks)
    return split_backward(schedule, draw(st.integers(0, 3) | st.none())) if draw(st.booleans()) else schedule


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Orders that no generator would write: a random run of the pipeline, some backwards whole and some split.

    A stage takes any action that its neighbours' actions so far allow, so it cannot deadlock.
    """
    stages, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    schedule = random_run(stages, chunks, draw(st.integers(1, 5)), random.Random(draw(st.integers(0, 2**32))))
    check_schedule(schedule)
    return schedule


def random_run(stages: int, chunks: int, micro_batches: int, choice: random.Random) -> Schedule:
    """A random run of the pipeline: a valid schedule that may hold any number of activations."""
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
        stage, chunk = position % stages, position // stages
        orders[stage].append(Action(stage, kind, chunk, counts[position]))
        counts[position] += 1
        if kind is Kind.BACKWARD:
            weights[position] += 1
    finished: tuple[Order, ...] = tuple(map(tuple, orders))
    return Schedule(stages=stages, chunks=chunks, micro_batches=micro_batches, orders=finished)
