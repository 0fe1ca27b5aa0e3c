# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy
import pytest

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox, Ring, RingClosedError
from testing.faults.network.slow_ring import SlowRing

SLOT = 4096
LATENCY_S = 0.15
EARLY_S = 0.002
"""Clocks are read one after another."""


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(8, SLOT)
    yield made
    made.close()


def description(number: int, nbytes: int) -> Description:
    return Description(
        sequence=number,
        iteration=0,
        direction=0,
        chunk=0,
        micro_batch=number,
        dtype=DATA_TYPES["uint8"],
        shape=[nbytes],
    )


def content(number: int, nbytes: int) -> numpy.ndarray:
    return numpy.random.default_rng(number).integers(0, 256, nbytes, dtype=numpy.uint8)


def read(ring: Ring) -> Callable[[], Event]:
    inbox = Inbox(max_message_nbytes=1 << 20, pooled_nbytes=1 << 20)

    def take() -> Event:
        event = inbox.next(ring, time.monotonic() + 5.0)
        assert event is not None
        return event

    return take


def test_what_is_written_arrives_late_whole_and_in_order(ring: Ring) -> None:
    asked: list[int | None] = []
    latency_s = 1.0

    def due_s(nbytes: int | None) -> float:
        asked.append(nbytes)
        return time.monotonic() + latency_s

    slow, take = SlowRing(ring, "test", due_s), read(ring)
    sent_s = time.monotonic()
    for number in range(3):
        sent = content(number, 3 * SLOT)
        slow.write(description(number, sent.nbytes), sent.ctypes.data, sent.nbytes, sent_s + 5.0)
        sent[:] = 0  # overwritten as soon as it has been written
        slow.write_ack(100 + number, sent_s + 5.0)
    assert time.monotonic() - sent_s < latency_s, "writing must not wait"
    for number in range(3):
        message = take()
        assert message.arrived_s - sent_s >= latency_s - EARLY_S
        assert numpy.array_equal(numpy.frombuffer(message.payload, numpy.uint8), content(number, 3 * SLOT))
        assert take().sequence == 100 + number
    assert asked == [3 * SLOT, None] * 3
    slow.close()


def test_healthy_link_is_written_at_once_unless_something_is_before(ring: Ring) -> None:
    latency_s = LATENCY_S
    slow, take = SlowRing(ring, "test", lambda nbytes: time.monotonic() + latency_s), read(ring)
    sent_s = time.monotonic()
    slow.write_ack(1, sent_s)
    latency_s = 0.0
    slow.write_ack(2, sent_s)
    assert (take().sequence, take().sequence) == (1, 2)
    assert time.monotonic() - sent_s >= LATENCY_S - EARLY_S
    until_s = time.monotonic() + 10.0
    while slow._unwritten:  # of its thread, which may be late to say that nothing is left
        assert time.monotonic() < until_s
        time.sleep(0.001)
    slow.write_ack(3, time.monotonic() + 1.0)
    assert ring.backlog, "it was not there at once"
    assert take().sequence == 3
    slow.close()


def test_farewell_is_heard_and_closing_waits_for_it(ring: Ring) -> None:
    slow, take = SlowRing(ring, "test", lambda nbytes: time.monotonic() + LATENCY_S), read(ring)
    slow.write_bye(time.monotonic())
    slow.close()
    assert take().kind == Event.Kind.BYE
    with pytest.raises(RingClosedError):
        take()


def test_closed_ring_says_so_and_what_was_on_its_way_is_lost(ring: Ring) -> None:
    slow, take = SlowRing(ring, "test", lambda nbytes: time.monotonic() + 10.0), read(ring)
    slow.write_ack(1, time.monotonic())
    ring.close()
    with pytest.raises(RingClosedError):
        slow.write_ack(2, time.monotonic())
    with pytest.raises(RingClosedError):
        take()
    slow.close()
