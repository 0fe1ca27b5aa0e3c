# SPDX-License-Identifier: Apache-2.0
"""One thread waits for several rings: by one call of the kernel, and where that has none, by a native thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest
from ring_producer import message, write

from adaptra_megatron.transport._ring import (
    DATA_TYPES,
    Description,
    Event,
    Inbox,
    Ring,
    RingClosedError,
    RingError,
    RingWatch,
)
from testing.faults.network.corrupted_rings import corrupt, is_set
from testing.waiting import until

SLOT = 4096
LARGEST = 5 * SLOT
IN_VAIN_S = 0.3
ROUNDS = 5


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(params=[True, False], ids=["futex_waitv", "a thread each"])
def watch(request: pytest.FixtureRequest) -> RingWatch:
    return RingWatch(futex_waitv=request.param)


@pytest.fixture
def inboxes() -> list[tuple[Inbox, Ring]]:
    return [(Inbox(max_message_nbytes=1 << 20, pooled_nbytes=1 << 20), Ring.create(4, SLOT)) for _ in range(3)]


def described(sequence: int, nbytes: int) -> Description:
    names = {"iteration": 0, "direction": 0, "chunk": 0, "micro_batch": sequence, "dtype": DATA_TYPES["uint8"]}
    return Description(sequence=sequence, shape=[nbytes], **names)


@contextmanager
def aside(*steps: object) -> Iterator[None]:
    """Do these while the test waits, each some time after the one before."""

    def run() -> None:
        for step in steps:
            time.sleep(0.05)
            step()  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def test_each_ring_delivers_all_its_messages(watch: RingWatch, inboxes: list[tuple[Inbox, Ring]]) -> None:
    messages = 40

    def produce(index: int) -> None:
        for number in range(messages):
            write(inboxes[index][1], number, message(index, number, LARGEST))

    threads = [threading.Thread(target=produce, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    came: list[list[Event]] = [[], [], []]
    while sum(map(len, came)) < 3 * messages:
        delivery = watch.next(inboxes, soon())
        assert delivery is not None
        event = delivery.event()
        assert event is not None
        came[delivery.index].append(event)
    for index, events in enumerate(came):
        assert [event.sequence for event in events] == list(range(messages))
        assert all(bytes(each.payload) == message(index, each.sequence, LARGEST).tobytes() for each in events)
    for thread in threads:
        thread.join()


def test_a_sleeping_thread_is_woken_by_any_ring_and_by_wake(
    watch: RingWatch, inboxes: list[tuple[Inbox, Ring]]
) -> None:
    for index in (2, 0, 1):
        ring, took_s = inboxes[index][1], []
        while len(took_s) < ROUNDS and min(took_s, default=1.0) >= 0.4:
            began_s = time.monotonic()
            with aside(lambda ring=ring: ring.write_ack(7, soon())):
                delivery = watch.next(inboxes, soon())
            took_s.append(time.monotonic() - began_s)
            assert delivery is not None
            assert delivery.index == index
        assert min(took_s) < 0.4, "it would have looked by itself after half a second"
    with aside(watch.wake):
        assert watch.next(inboxes, soon()) is None
    watch.wake()
    assert watch.next(inboxes, soon()) is None, "a wake-up before the wait"
    with aside(inboxes[1][1].close):
        delivery = watch.next(inboxes, soon())
    assert delivery is not None
    with pytest.raises(RingClosedError):
        delivery.event()


def test_waiting_in_vain_costs_hardly_anything(watch: RingWatch, inboxes: list[tuple[Inbox, Ring]]) -> None:
    before_s, began_s = time.process_time(), time.monotonic()
    assert watch.next(inboxes, soon(IN_VAIN_S)) is None
    assert time.monotonic() >= began_s + IN_VAIN_S
    assert time.process_time() - before_s < IN_VAIN_S / 3


def test_an_inbox_is_left_to_the_thread_that_waits_there(watch: RingWatch, inboxes: list[tuple[Inbox, Ring]]) -> None:
    box, ring = inboxes[0]
    got: list[Event | None] = []
    waiting = threading.Thread(target=lambda: got.append(box.next(ring, soon())))
    waiting.start()
    until(lambda: is_set(ring.fd, "waiting for filled"))
    with aside(lambda: ring.write_ack(5, soon())):
        assert watch.next(inboxes, soon(0.5)) is None
    waiting.join()
    assert got[0] is not None
    assert got[0].sequence == 5
    ring.write_ack(6, soon())
    ring.write_ack(7, soon())
    assert (event := box.next(ring, soon())) is not None
    assert event.sequence == 6
    delivery = watch.next(inboxes, soon())
    assert delivery is not None
    assert delivery.event().sequence == 7  # type: ignore[union-attr]


def test_room_in_any_of_the_full_rings_is_seen(watch: RingWatch) -> None:
    rings = [Ring.create(2, SLOT) for _ in range(3)]
    for ring in rings:
        ring.write_ack(1, 0.0)
        ring.write_ack(2, 0.0)
    assert watch.await_room(rings, soon(0.1)) is None
    box = Inbox(max_message_nbytes=1 << 20, pooled_nbytes=0)
    for index, ring in ((1, rings[1]), (2, rings[2])):
        with aside(lambda ring=ring: box.next(ring, soon())):
            assert watch.await_room(rings, soon()) == index
        ring.write_ack(3, 0.0)
    with aside(rings[0].close):
        assert watch.await_room(rings, soon()) == 0


def test_spoilt_memory_is_seen_though_nothing_comes(watch: RingWatch, inboxes: list[tuple[Inbox, Ring]]) -> None:
    with aside(lambda: corrupt(inboxes[2][1].fd, "together for filled", 1)):
        delivery = watch.next(inboxes, soon())
    assert delivery is not None
    assert delivery.index == 2
    with pytest.raises(RingError, match="count of who waits"):
        delivery.event()
    full = Ring.create(2, SLOT)
    full.write_ack(1, 0.0)
    full.write_ack(2, 0.0)
    with aside(lambda: corrupt(full.fd, "magic", 0)):
        assert watch.await_room([full], soon()) == 0


def test_a_message_is_written_in_parts_as_there_is_room() -> None:
    ring, box = Ring.create(2, SLOT), Inbox(max_message_nbytes=1 << 20, pooled_nbytes=0)
    content = numpy.arange(4 * SLOT + 5, dtype=numpy.uint32).astype(numpy.uint8)
    reached, came = 0, None
    while reached <= content.nbytes:
        reached = ring.write_some(described(0, content.nbytes), content.ctypes.data, content.nbytes, reached, SLOT, 0.0)
        if reached % SLOT == 0 and ring.backlog == 2:
            assert ring.write_some(described(0, content.nbytes), 0, content.nbytes, reached, SLOT, 0.0) == reached, (
                "full"
            )
            came = box.next(ring, time.monotonic())
    came = came or box.next(ring, soon())
    assert came is not None
    assert bytes(came.payload) == content.tobytes()
    ring.write_some(described(1, 0), 0, 0, 0, SLOT, 0.0)
    assert (empty := box.next(ring, soon())) is not None
    assert empty.total_nbytes == 0
