# SPDX-License-Identifier: Apache-2.0
"""When a neighbour's messages count as coming at random, and when no longer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from adaptra_megatron.engine.dispatch import STEADY_AFTER, TRIED_AFTER, UNSTEADY_AFTER, ArrivalJitter
from adaptra_megatron.telemetry.action_records import ArrivalRecord

ACTION_S = 0.02
MICRO_BATCHES = 16


def observe(
    watched: ArrivalJitter, iterations: int, delay_s: Callable[[], float], *, period_s: float = 0.06
) -> list[bool]:
    """Messages are sent every `period_s`, in iterations that begin whenever, and never overtake one another."""
    states = []
    for iteration in range(iterations):
        start_s = arrived_s = 7.77 * iteration
        arrivals = []
        for micro_batch in range(MICRO_BATCHES):
            arrived_s = max(arrived_s, start_s + micro_batch * period_s + delay_s())
            arrivals.append(ArrivalRecord(iteration, 0, 1, "F", 0, micro_batch, arrived_s))
        watched.observe(arrivals, ACTION_S)
        states.append(watched.unsteady)
    return states


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.3])
def test_a_constant_delay_is_steady_however_long(delay_s: float) -> None:
    assert not any(observe(ArrivalJitter(), 20, lambda: delay_s))


def test_noise_of_a_tenth_of_an_action_is_steady() -> None:
    chosen = random.Random(1)
    assert not any(observe(ArrivalJitter(), 50, lambda: chosen.uniform(0.0, 0.1 * ACTION_S)))


@pytest.mark.parametrize("mean", [1.0, 2.0, 6.0])
def test_random_delays_of_an_action_and_more_are_not(mean: float) -> None:
    chosen = random.Random(2)
    states = observe(ArrivalJitter(), 20, lambda: chosen.expovariate(1 / (mean * ACTION_S)))
    assert states == [False] * UNSTEADY_AFTER + [True] * (20 - UNSTEADY_AFTER)


def test_one_odd_iteration_changes_nothing() -> None:
    watched, chosen = ArrivalJitter(), random.Random(3)
    observe(watched, 5, lambda: 0.01)
    assert not any(observe(watched, 1, lambda: chosen.expovariate(1 / 0.05)))
    watched.observe([], ACTION_S)  # nor one in which nothing came
    assert not any(observe(watched, 1, lambda: 0.01)[: UNSTEADY_AFTER - 1])
    watched = ArrivalJitter()
    assert not any(observe(watched, 5, lambda: 0.01) + observe(watched, 5, lambda: 0.01, period_s=0.1)), "a new plan"


def test_it_becomes_steady_again_when_delays_do_and_is_looked_at_anew_after_a_while() -> None:
    watched, chosen = ArrivalJitter(), random.Random(4)

    def at_random() -> float:
        return chosen.expovariate(1 / 0.04)

    assert observe(watched, 10, at_random)[-1]
    states = observe(watched, 10, lambda: 0.01)
    assert states == [True] * STEADY_AFTER + [False] * (10 - STEADY_AFTER)
    states = observe(watched, 2 * TRIED_AFTER, at_random)
    assert states.count(False) == 2 * UNSTEADY_AFTER - 1
    assert states[-1]
