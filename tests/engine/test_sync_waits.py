# SPDX-License-Identifier: Apache-2.0
"""How long gradients of others are waited for: by the clock on CPUs, by events of the stream on GPUs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from adaptra_megatron.control.detector.straggler_arrivals import Row
from adaptra_megatron.engine.sync_arrivals import ClockMoments, StreamMoments, SyncArrivals, SyncWaits


class Stream:
    """A GPU's: what is put on it happens later, one after the other."""

    def __init__(self) -> None:
        self.launched_s = 0.0
        """When all that was put on it will have been done, on its own clock."""
        self.now_s = 0.0
        self.events = 0

    def event(self) -> Any:
        self.events += 1
        return Event(self)


class Event:
    """As torch.cuda.Event."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.at_s = stream, float("inf")

    def record(self) -> None:
        self.at_s = self._stream.launched_s

    def query(self) -> bool:
        return self.at_s <= self._stream.now_s

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "torch raises for events that are not there yet"
        return 1e3 * (later.at_s - self.at_s)


class Watch:
    """Takes rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def lasts(self, iteration_s: float) -> None:
        """All ranks say so."""

    def add(self, row: Row) -> None:
        self.rows.append(row)


def test_nothing_is_measured_until_it_is_wanted() -> None:
    waits = SyncWaits()
    assert waits.synchronize(lambda: 7) == 7
    assert waits.read(lambda: "batch") == "batch"
    assert waits.take() is None


def test_on_a_cpu_all_chunks_count_together() -> None:
    waits, watch = SyncWaits(), Watch()
    arrivals = SyncArrivals(watch, waits)  # type: ignore[arg-type]
    waits.want(ClockMoments())
    begun_s = time.monotonic()
    waits.read(lambda: time.sleep(0.01))
    for _ in range(2):
        waits.synchronize(lambda: time.sleep(0.02))
    whole_s = time.monotonic() - begun_s
    arrivals.add(5, 1000.0, arrivals.take(), None)
    (row,) = watch.rows
    assert row.iteration == 5
    assert row.wait_s >= 0.04
    assert row.data_s >= 0.01
    assert row.wait_s + row.data_s <= whole_s
    assert row.computed_s == pytest.approx(1000.0 - row.wait_s - row.data_s)
    arrivals.add(6, 1.0, arrivals.take(), None)
    assert len(watch.rows) == 1, "an evaluation synchronises nothing"


def test_data_that_end_are_timed_too() -> None:
    waits = SyncWaits()
    waits.want(ClockMoments())
    with pytest.raises(StopIteration):
        waits.read(lambda: next(iter(())))


def test_on_a_gpu_it_is_what_the_stream_waits_and_nothing_waits_for_that() -> None:
    stream, waits, watch = Stream(), SyncWaits(), Watch()
    waits.want(StreamMoments(stream.event, lambda: False))
    arrivals = SyncArrivals(watch, waits)  # type: ignore[arg-type]

    def reduce() -> None:
        stream.launched_s += 0.3

    for iteration in range(3):
        stream.launched_s += 1.0  # computing
        waits.synchronize(reduce)
        arrivals.add(iteration, 1.4, arrivals.take(), 0.9)
        assert len(watch.rows) == max(0, iteration - 1), "what has not happened is not waited for"
        stream.now_s = stream.launched_s - 1.2 * (iteration < 2)
    arrivals.add(3, 1.4, None, None)
    assert [row.iteration for row in watch.rows] == [0, 1, 2]
    assert [row.wait_s for row in watch.rows] == pytest.approx([0.3] * 3)
    assert {row.computed_s for row in watch.rows} == {0.9}
    assert stream.events <= 6
    waits.synchronize(reduce)
    assert stream.events <= 6, "events are used again"


def test_nothing_is_marked_while_a_graph_is_captured() -> None:
    stream, waits = Stream(), SyncWaits()
    waits.want(StreamMoments(stream.event, lambda: True))
    assert waits.synchronize(lambda: 7) == 7
    assert (stream.events, waits.take()) == (0, None)


def test_of_a_gpu_that_never_comes_there_the_latest_are_kept() -> None:
    stream, waits, watch = Stream(), SyncWaits(), Watch()
    waits.want(StreamMoments(stream.event, lambda: False))
    arrivals = SyncArrivals(watch, waits)  # type: ignore[arg-type]
    stream.launched_s = 1.0
    for iteration in range(50):
        waits.synchronize(lambda: None)
        arrivals.add(iteration, 1.0, arrivals.take(), 0.9)
    stream.now_s = 2.0
    arrivals.add(50, 1.0, None, None)
    assert [row.iteration for row in watch.rows] == list(range(42, 50))
