# SPDX-License-Identifier: Apache-2.0
"""Paces that are foretold are those of an event simulation, and what is chosen by them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adaptra_megatron.gradsync.sync_modes import (
    STRAGGLING,
    Mode,
    ModeKind,
    choose,
    clusters,
    pace,
    stragglers,
)
from adaptra_megatron.schedule.ir import ScheduleError
from testing.update_simulation import simulated_pace

BOUND = 4
NOISES = (0.0, 5.0, 100.0, float("inf"))
TIMES = st.lists(st.floats(0.1, 1.0), min_size=2, max_size=8)
APART = [1 + math.sqrt(prime) % 1 / 100 for prime in (2, 3, 5, 7, 11, 13, 17, 19)]
"""Factors after which no two replicas come at exactly the same time, where who is first would be anyone's choice."""


@settings(max_examples=40)
@given(TIMES, st.integers(1, 8), st.integers(1, 6), st.booleans())
# Patterns that take thousands of updates to repeat: means over different updates differ by 1.4 to 2.3%.
@example([1.0, 1.0, 1.0, 1.0, 0.71875], 1, 4, False)
@example([1.0, 0.5, 1.0, 0.71875, 1.0, 1.0], 1, 4, False)
@example([0.5, 1.0, 1.0, 1.0, 1.0, 0.75], 1, 4, False)
def test_a_pace_is_that_of_a_simulation_of_events(times_s: list[float], x: int, bound: int, dynamic: bool) -> None:
    times_s = [time_s * factor for time_s, factor in zip(times_s, APART, strict=False)]
    count = len(times_s)
    mode = Mode.dynamic(clusters(times_s)) if dynamic else Mode.x_order(count, min(x, count))
    foretold = pace(times_s, mode, bound)
    simulated = simulated_pace(mode, bound, lambda replica, _: times_s[replica])
    assert foretold == pytest.approx(simulated, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("mode", "expected_s"),
    [(Mode.ssgd(8), 0.3), (Mode.x_order(8, 7), 0.1), (Mode.x_order(8, 1), 1 / (70 + 1 / 0.3))],
    ids=str,
)
def test_paces_that_are_known(mode: Mode, expected_s: float) -> None:
    """One of 8 takes 3 times as long; mode 7 loses what its late one waits for others."""
    assert pace([0.1] * 7 + [0.3], mode, 100).update_s == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_chosen(noise: float) -> None:
    every = tuple(ModeKind)
    alike = [0.1 + 0.001 * replica for replica in range(8)]
    assert choose(alike, every, BOUND, noise).mode == Mode.ssgd(8)
    slow = [*alike[:7], 0.3]
    seven, groups = Mode.x_order(8, 7), Mode.dynamic([range(7), [7]])
    assert choose(slow, every, BOUND, noise).mode in (seven, groups)
    assert choose(slow, (ModeKind.X_ORDER,), BOUND, noise).mode == seven
    assert choose(slow, (ModeKind.DYNAMIC,), BOUND, noise).mode == groups
    assert choose(slow, (), BOUND, noise).mode == Mode.ssgd(8)


@settings(max_examples=8)
@given(TIMES, st.floats(0, 1000), st.integers(1, 8))
def test_what_is_chosen_is_never_worse_than_synchronous_training(
    times_s: list[float], noise: float, bound: int
) -> None:
    chosen = choose(times_s, tuple(ModeKind), bound, noise)
    assert chosen.progress_s <= max(times_s) * (1 + 1e-9)
    if not stragglers(times_s):
        assert chosen.mode.kind is ModeKind.SSGD


@given(TIMES)
def test_clusters_are_all_replicas_and_of_like_speed(times_s: list[float]) -> None:
    found = clusters(times_s)
    assert sorted(replica for group in found for replica in group) == list(range(len(times_s)))
    slowest = [max(times_s[replica] for replica in group) for group in found]
    assert slowest == sorted(slowest)
    if not stragglers(times_s):
        assert max(times_s) <= (1 + STRAGGLING) * min(times_s)


def test_a_straggler_stays_one_until_it_is_clearly_none() -> None:
    times_s = [1.0, 1.0, 1.15]
    assert stragglers(times_s) == frozenset()
    assert stragglers(times_s, frozenset({2})) == frozenset({2})
    assert stragglers([1.0, 1.0, 1.05], frozenset({2})) == frozenset()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mode.x_order(4, 5), "x is 5, but there are 4 replicas"),
        (lambda: Mode.x_order(4, 0), "x"),
        (lambda: Mode.dynamic([[0, 1], [1, 2]]), "each of them once"),
        (lambda: pace([0.1, 0.0], Mode.ssgd(2), 1), "above 0"),
        (lambda: pace([0.1], Mode.ssgd(2), 1), "1 times for a mode of 2"),
        (lambda: pace([0.1, 0.1], Mode.ssgd(2), 0), "max_staleness"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        call()
