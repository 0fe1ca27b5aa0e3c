# SPDX-License-Identifier: Apache-2.0
"""Offset and drift of made-up clocks, from messages with made-up delays."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.control.clocks import MAX_DRIFT, ClockFit, ClockLine, Round, Stamps, round_of

LEAST_S = 20e-6
"""Least time of any message."""


class RemoteClock:
    """Runs from its own zero, at its own rate."""

    def __init__(self, offset_s: float, drift: float) -> None:
        self.offset_s, self.drift = offset_s, drift

    def offset_at(self, local_s: float) -> float:
        return self.offset_s + self.drift * local_s


def ask(remote: RemoteClock, at_s: float, request_s: float, answer_s: float, thinking_s: float = 0.0) -> Stamps:
    received_s = at_s + request_s
    answered_s = received_s + thinking_s
    back_s = answered_s + answer_s
    return Stamps(at_s, received_s + remote.offset_at(received_s), answered_s + remote.offset_at(answered_s), back_s)


delays = st.lists(
    st.tuples(st.floats(LEAST_S, 5e-3), st.floats(LEAST_S, 5e-3), st.floats(0.0, 1e-3)), min_size=1, max_size=8
)


@given(
    offset_s=st.floats(-1e6, 1e6),
    drift=st.floats(-200e-6, 200e-6),
    rounds=st.lists(st.tuples(st.floats(0.5, 30.0), delays), min_size=1, max_size=40),
    later_s=st.floats(0.0, 30.0),
)
def test_the_error_stays_below_half_the_best_round_trip_and_what_drift_adds(
    offset_s: float, drift: float, rounds: list[tuple[float, list[tuple[float, float, float]]]], later_s: float
) -> None:
    """Whatever messages take, each way."""
    remote, fit, now_s = RemoteClock(offset_s, drift), ClockFit(), 0.0
    for pause_s, exchanges in rounds:
        now_s += pause_s
        stamps = []
        for request_s, answer_s, thinking_s in exchanges:
            stamps.append(ask(remote, now_s, request_s, answer_s, thinking_s))
            now_s = stamps[-1].back_s
        line = fit.add(round_of(stamps))
        best_s = min(request_s + answer_s for request_s, answer_s, _ in exchanges)
        spent_s = stamps[-1].back_s - stamps[0].sent_s
        assert line.half_s <= best_s / 2 + MAX_DRIFT * spent_s + 1e-9
    rounding_s = 1e-15 * abs(offset_s) * 16 + 1e-9
    for local_s in (line.at_s, line.at_s + later_s):
        off_s = abs(line.offset_at(local_s) - remote.offset_at(local_s))
        assert off_s <= line.error_at(local_s) + 2 * MAX_DRIFT * spent_s + rounding_s
    assert line.error_at(line.at_s + later_s) <= line.half_s + MAX_DRIFT * later_s + 1e-9


def follow(remote: RemoteClock, *, rounds: int, interval_s: float, seed: int = 0) -> tuple[ClockFit, ClockLine, float]:
    """A usual network: 50 us each way, and now and then much more one way."""
    draw, fit, now_s = random.Random(seed), ClockFit(), 0.0
    line = None
    for _ in range(rounds):
        stamps = []
        for _ in range(8):
            request_s, answer_s = (50e-6 + draw.expovariate(1 / 200e-6) for _ in range(2))
            stamps.append(ask(remote, now_s, request_s, answer_s))
            now_s = stamps[-1].back_s
        line = fit.add(round_of(stamps))
        now_s += interval_s
    assert line is not None
    return fit, line, now_s


@pytest.mark.parametrize("drift", [0.0, 20e-6, -80e-6, 300e-6])
def test_drift_is_learnt_within_minutes(drift: float) -> None:
    remote = RemoteClock(-4321.0, drift)
    _, line, now_s = follow(remote, rounds=20, interval_s=10.0)
    assert line.drift == pytest.approx(drift, abs=1e-6)
    hour_s = now_s + 600.0
    assert line.offset_at(hour_s) == pytest.approx(remote.offset_at(hour_s), abs=1e-3), "ten minutes without an answer"
    assert abs(line.offset_at(line.at_s) - remote.offset_at(line.at_s)) < 60e-6


def test_long_runs_are_related_better_than_by_any_round_alone() -> None:
    errors = []
    for seed in range(20):
        remote = RemoteClock(17.0, 35e-6)
        _, line, _ = follow(remote, rounds=60, interval_s=10.0, seed=seed)
        errors.append(abs(line.offset_at(line.at_s) - remote.offset_at(line.at_s)))
    assert sorted(errors)[10] < 25e-6


def test_a_clock_that_jumps_is_followed_at_once() -> None:
    remote = RemoteClock(100.0, 10e-6)
    fit, before, now_s = follow(remote, rounds=20, interval_s=10.0)
    remote.offset_s += 3.0
    after = fit.add(round_of([ask(remote, now_s, 1e-4, 1e-4)]))
    assert after.offset_at(now_s) == pytest.approx(remote.offset_at(now_s), abs=2e-4)
    assert before.offset_at(now_s) == pytest.approx(remote.offset_at(now_s) - 3.0, abs=2e-4)


def test_a_clock_that_jumps_between_its_two_stamps_makes_no_harm() -> None:
    fit = ClockFit()
    line = fit.add(Round(0.0, 5.0, 4.0))
    assert (line.offset_s, line.half_s) == (4.5, 0.5)


def test_one_round_says_nothing_of_drift() -> None:
    line = ClockFit().add(round_of([Stamps(10.0, 110.001, 110.002, 10.004)]))
    assert (line.drift, line.rate) == (0.0, MAX_DRIFT)
    assert line.half_s == pytest.approx(1.5e-3)
    assert line.offset_s == pytest.approx(99.9995)


def test_a_wider_past_never_makes_the_present_worse() -> None:
    """The interval of the latest round only shrinks by what came before."""
    remote, draw, fit = RemoteClock(0.0, 50e-6), random.Random(3), ClockFit()
    halves = []
    for number in range(30):
        entry = round_of([ask(remote, 10.0 * number, draw.uniform(1e-4, 3e-3), draw.uniform(1e-4, 3e-3))])
        halves.append((fit.add(entry).half_s, entry.half_s))
    assert all(fitted_s <= alone_s + 1e-12 for fitted_s, alone_s in halves)
    assert sum(fitted_s < 0.9 * alone_s for fitted_s, alone_s in halves[10:]) > 5
    assert all(earlier != later for earlier, later in pairwise(halves))
