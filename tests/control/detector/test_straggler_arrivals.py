# SPDX-License-Identifier: Apache-2.0
"""Who comes last to gradient synchronisation, since when, and what it costs: from waits alone, with hysteresis."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.control.detector.straggler_arrivals import (
    LEAST,
    UNUSUAL,
    WINDOW,
    Late,
    Row,
    Stragglers,
    beyond_others,
)
from adaptra_megatron.gradsync.replica_sums import last_arrival

ITERATION_S, SYNC_S = 1.5, 0.1


class Job:
    """Replicas whose stages arrive at given moments; all leave `SYNC_S` after the last one has come."""

    def __init__(self, replicas: int, stages: int, seed: int = 0) -> None:
        self.judge = Stragglers(replicas, stages)
        self._replicas, self._stages = replicas, stages
        self._random = random.Random(seed)
        self.iteration = 0
        self.found: list[tuple[int, Late]] = []
        self.over: list[tuple[int, int]] = []

    def run(
        self,
        iterations: int,
        late_s: Callable[[Cell], float] = lambda place: 0.0,
        computes_s: Callable[[Cell], float] = lambda place: 0.0,
        noise_s: float = 0.02,
    ) -> None:
        for _ in range(iterations):
            rows = {}
            for stage in range(self._stages):
                places = [Cell(replica, stage) for replica in range(self._replicas)]
                arrived_s = [1.0 + late_s(place) + self._random.uniform(0, noise_s) for place in places]
                for place, at_s in zip(places, arrived_s, strict=True):
                    wait_s = max(arrived_s) + SYNC_S - at_s
                    rows[place] = Row(self.iteration, at_s + wait_s, wait_s, 0.5 + computes_s(place))
            self.judge.observe(rows)
            found, over = self.judge.judge()
            self.found += [(self.iteration, each) for each in found]
            self.over += [(self.iteration, each) for each in over]
            self.iteration += 1


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_one_replica_is_late_from_an_iteration_on(replicas: int) -> None:
    job = Job(replicas, 2)
    job.run(30)
    assert not job.found
    job.run(40, lambda place: 0.18 * (place.replica == 1))
    ((at, late),) = job.found
    assert at - 30 <= WINDOW
    assert (late.replica, late.since) == (1, 30)
    assert late.last >= 14
    assert late.of == WINDOW
    assert late.lag_s == pytest.approx(0.18, abs=0.03)
    (now,) = job.judge.late()
    assert now.last == WINDOW
    assert now.share == pytest.approx(0.17 / 1.29, rel=0.2)
    job.run(40)
    ((over_at, replica),) = job.over
    assert (replica, over_at - 70 <= WINDOW) == (1, True)
    assert not job.judge.late()


@given(st.integers(2, 9), st.integers(0, 1000), st.floats(0.0, 0.3))
def test_those_who_come_last_at_random_are_not_found(replicas: int, seed: int, noise_s: float) -> None:
    job = Job(replicas, 1, seed)
    job.run(40, noise_s=noise_s)
    assert not job.found


def test_the_first_iterations_of_a_process_do_not_count() -> None:
    job = Job(3, 1)
    job.run(UNUSUAL, lambda place: 9.0 * (place.replica == 0))
    job.run(LEAST - 1, lambda place: 0.5 * (place.replica == 0))
    assert not job.found
    job.run(1, lambda place: 0.5 * (place.replica == 0))
    assert [(late.replica, late.since, late.last) for _, late in job.found] == [(0, UNUSUAL, LEAST)]


def test_one_pause_of_many_iterations_is_no_straggler_and_on_and_off_is_said_once() -> None:
    job = Job(4, 1)
    job.run(20)
    job.run(1, lambda place: 5.0 * (place.replica == 2))
    job.run(20)
    assert not job.found
    for number in range(40):  # late in nine of ten
        job.run(1, lambda place, late=number % 10 > 0: 0.3 * (late and place.replica == 2))  # type: ignore[misc]
    assert [late.replica for _, late in job.found] == [2]
    for number in range(60):  # late in every other: neither begins nor ends it
        job.run(1, lambda place, late=number % 2 > 0: 0.3 * (late and place.replica == 2))  # type: ignore[misc]
    assert len(job.found) == 1
    assert not job.over


def test_two_of_eight_that_are_late_alike_are_both_found_and_cost_the_same_time() -> None:
    job = Job(8, 1)
    job.run(UNUSUAL + WINDOW, lambda place: 0.3 * (place.replica in (2, 5)), noise_s=0.001)
    late = job.judge.late()
    assert [each.replica for each in late] == [2, 5]
    assert [each.share for each in late] == pytest.approx([0.3 / 1.4] * 2, rel=0.05)
    assert sum(each.last for each in late) == WINDOW


def test_the_stage_that_computes_longer_is_named_though_all_of_the_replica_come_late() -> None:
    job = Job(3, 4)
    job.run(
        LEAST + UNUSUAL + 5,
        lambda place: (0.4 if place.stage == 0 else 0.35) * (place.replica == 2),
        lambda place: 0.3 * (place == (2, 3)),
    )
    ((_, late),) = job.found
    assert (late.replica, late.stage) == (2, 3)
    assert late.computes_s == pytest.approx(0.3, abs=0.01)


def test_what_is_not_worth_it_is_not_found() -> None:
    job = Job(3, 1)
    job.run(60, lambda place: 0.03 * (place.replica == 0), noise_s=0.0)
    assert not job.found
    assert job.judge.lags_s() == [[pytest.approx(0.03), pytest.approx(-0.03), pytest.approx(-0.03)]]


@given(st.lists(st.lists(st.integers(-50, 50), min_size=5, max_size=5), min_size=1, max_size=4))
def test_beyond_others_is_what_it_says(values: list[list[int]]) -> None:
    found = beyond_others(np.array(values, dtype=float))
    for row, beyond in zip(values, found.tolist(), strict=True):
        for index, value in enumerate(row):
            others = sorted(row[:index] + row[index + 1 :])
            assert beyond[index] == value - others[(len(others) - 1) // 2]


def test_the_last_arrival_waits_least() -> None:
    assert last_arrival([0.5, 0.2, 0.4]) == (1, pytest.approx(0.2))
