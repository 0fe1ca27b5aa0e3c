# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth that went into arrivals come out of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptra_megatron.control.detector.series import Messages, fit_link, least_held

LATENCIES_S = st.floats(0.0, 0.1)


def carried(sent_s: list[float], nbytes: list[int], latency_s: float, seconds_per_byte: float) -> Messages:
    left_s, arrived_s = -math.inf, []
    for moment_s, size in zip(sent_s, nbytes, strict=True):
        left_s = max(moment_s, left_s) + size * seconds_per_byte
        arrived_s.append(left_s + latency_s)
    return Messages(
        np.array(nbytes, dtype=float), np.array(sent_s), np.array(arrived_s), np.ones(len(sent_s), dtype=bool)
    )


def steady(count: int, every_s: float = 0.01) -> list[float]:
    return [index * every_s for index in range(count)]


@given(latency_s=LATENCIES_S, occupancy_s=st.floats(0.011, 0.2), count=st.integers(6, 64))
@settings(max_examples=60)
def test_messages_that_wait_for_each_other_tell_the_bandwidth(latency_s: float, occupancy_s: float, count: int) -> None:
    fit = fit_link(carried(steady(count), [1000] * count, latency_s, occupancy_s / 1000), None)
    assert fit.identified
    assert fit.seconds_per_byte * 1000 == pytest.approx(occupancy_s, rel=0.02)
    assert float(np.median(fit.latency_s)) == pytest.approx(latency_s, abs=0.02 * occupancy_s * count)


@given(latency_s=LATENCIES_S, occupancy_s=st.floats(0.0, 0.0099), count=st.integers(1, 64))
@settings(max_examples=60)
def test_equal_messages_that_never_wait_leave_the_two_joined(latency_s: float, occupancy_s: float, count: int) -> None:
    fit = fit_link(carried(steady(count), [1000] * count, latency_s, occupancy_s / 1000), None)
    assert fit.seconds_per_byte == 0.0
    assert fit.latency_s == pytest.approx([latency_s + occupancy_s] * count)


@given(
    latency_s=LATENCIES_S,
    seconds_per_byte=st.floats(1e-7, 1e-5),
    sizes=st.lists(st.integers(1, 1000), min_size=8, max_size=40),
)
@settings(max_examples=60)
def test_sizes_that_differ_tell_the_bandwidth(latency_s: float, seconds_per_byte: float, sizes: list[int]) -> None:
    assume(np.quantile(sizes, 0.8) > 2 * np.quantile(sizes, 0.2) > 0)
    fit = fit_link(carried(steady(len(sizes), 0.1), sizes, latency_s, seconds_per_byte), None)
    assert fit.identified
    assert fit.seconds_per_byte == pytest.approx(seconds_per_byte, rel=0.02)


def test_a_known_bandwidth_is_kept_while_nothing_contradicts_it_and_no_longer() -> None:
    idle = carried(steady(8, 0.1), [1000] * 8, 0.002, 2e-5)
    assert fit_link(idle, 2e-5).latency_s == pytest.approx([0.002] * 8)
    healed = carried(steady(8, 0.01), [1000] * 8, 0.002, 0.0)
    assert fit_link(healed, 2e-5).seconds_per_byte == 0.0


def test_late_receives_tell_nothing_yet_keep_the_link_busy() -> None:
    messages = carried([0.0, 0.001, 0.002, 0.2, 0.3, 0.4], [1000] * 6, 0.005, 1e-5)
    messages = messages._replace(telling=np.array([False, True, True, True, True, True]))
    assert fit_link(messages, 1e-5).latency_s == pytest.approx([0.005] * 5)


def test_of_messages_let_go_together_only_the_last_tells() -> None:
    sent_s = np.array([0.0, 0.01, 0.02, 0.03, 0.04])
    arrived_s = np.array([0.002, 0.50, 0.50, 0.50, 0.51])
    assert least_held(sent_s, arrived_s).tolist() == [True, False, False, True, True]
