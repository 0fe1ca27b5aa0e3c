# SPDX-License-Identifier: Apache-2.0
"""Moments of a device in seconds of the host, though its clock drifts, threads are late and queues are held up."""

from __future__ import annotations

import random

import pytest
from support.gpu.made_up_streams import MadeUpEvent, MadeUpStreams

from adaptra_megatron.engine.execution.executor import CudaEventTimer
from adaptra_megatron.transport.gpu.device_clock import ANCHOR_EVERY_S, EXACT_S, LOOK_S, OLDEST_S, TRIES, DeviceClock

DRIFT = 5e-5
"""50 ppm: a bad crystal."""


class Host:
    """A clock that takes time to be read, and a thread that may lose its core between two readings."""

    def __init__(
        self, seed: int = 0, *, reading_s: float = 1e-6, late_share: float = 0.0, late_s: float = 5e-3
    ) -> None:
        self.now_s = 1e5
        self._reading_s, self._late_share, self._late_s = reading_s, late_share, late_s
        self._random = random.Random(seed)

    def __call__(self) -> float:
        self.now_s += self._reading_s
        if self._random.random() < self._late_share:
            self.now_s += self._random.uniform(0.0, 5e-3)
        return self.now_s


def errors_s(host: Host, streams: MadeUpStreams, seconds: int) -> list[float]:
    """How wrong the clock is about a mark in each second that passes."""
    clock, wrong_s = DeviceClock(streams, host), []
    for _ in range(seconds):
        mark: MadeUpEvent = clock.mark()
        assert mark.time_s is not None
        truth_s = streams.zero_s + mark.time_s / (1.0 + DRIFT)
        host.now_s += 1.0
        wrong_s.append(abs(clock.seconds([mark])[0] - truth_s))
        clock.use_again([mark])
    return wrong_s


def test_drift_is_learnt_from_two_anchors() -> None:
    host = Host()
    wrong_s = errors_s(host, MadeUpStreams(host, DRIFT), 60)
    learnt = int(ANCHOR_EVERY_S) + 2
    assert max(wrong_s[:learnt]) < 1.2 * ANCHOR_EVERY_S * DRIFT
    assert max(wrong_s[learnt:]) < 5e-6


@pytest.mark.parametrize("seed", range(5))
def test_a_thread_that_is_late_does_not_shift_the_times(seed: int) -> None:
    host = Host(seed, late_share=0.2)
    wrong_s = errors_s(host, MadeUpStreams(host, DRIFT), 120)
    assert max(wrong_s[30:]) < 2 * EXACT_S, "an anchor is exact, and the drift since the one before, too"


def test_anchors_are_taken_seldom() -> None:
    host = Host()
    streams = MadeUpStreams(host)
    clock = DeviceClock(streams, host)
    for _ in range(100):
        clock.seconds([])
        host.now_s += 1.0
    assert streams.events_made == 10 * TRIES
    assert streams.synchronized == 0


def test_an_anchor_that_is_held_up_is_looked_for_briefly_and_waited_for_seldom() -> None:
    host = Host(reading_s=5e-5)
    streams = MadeUpStreams(host)
    clock = DeviceClock(streams, host)
    clock.seconds([])
    mark = clock.mark()
    truth_s = streams.zero_s + mark.time_s
    for _ in range(int(OLDEST_S) - 2):
        host.now_s += 1.0
        streams.apart.stand_still_until(streams.begun_s() + 0.1)  # as behind what waits for a peer
        before_s = host.now_s
        clock.seconds([])
        assert host.now_s - before_s < 1.5 * TRIES * LOOK_S
        assert clock.seconds([mark]) == pytest.approx([truth_s], abs=EXACT_S), "by the anchor there is"
    host.now_s += 5.0
    streams.apart.stand_still_until(streams.begun_s() + 0.1)
    before_s = host.now_s
    clock.seconds([])
    assert 0.1 < host.now_s - before_s < 0.3, "not for ever by an old one"
    later = clock.mark()
    assert clock.seconds([later]) == pytest.approx([streams.zero_s + later.time_s], abs=EXACT_S)


def test_the_first_anchor_is_waited_for() -> None:
    host = Host(reading_s=5e-5)
    streams = MadeUpStreams(host)
    streams.apart.stand_still_until(0.5)
    clock = DeviceClock(streams, host)
    clock.seconds([])
    mark = clock.mark()
    assert clock.seconds([mark]) == pytest.approx([streams.zero_s + mark.time_s], abs=EXACT_S)


def test_marks_are_over_when_the_device_has_come_to_the_last() -> None:
    host = Host()
    streams = MadeUpStreams(host)
    timer = CudaEventTimer(DeviceClock(streams, host))
    assert timer.over([])
    marks = [timer.mark()]
    streams.current.stand_still_until(2.0)
    marks.append(timer.mark())
    assert not timer.over(marks)
    host.now_s += 3.0
    assert timer.over(marks)
    assert timer.resolve(marks) == pytest.approx([streams.zero_s, streams.zero_s + 2.0], abs=1e-4)


def test_a_device_that_failed_says_so_where_its_times_are_wanted() -> None:
    host = Host()
    streams = MadeUpStreams(host)
    timer = CudaEventTimer(DeviceClock(streams, host))
    marks = [timer.mark()]
    streams.failure = RuntimeError("CUDA error: device lost")
    assert not timer.over(marks)
    with pytest.raises(RuntimeError, match="device lost"):
        timer.resolve(marks)
