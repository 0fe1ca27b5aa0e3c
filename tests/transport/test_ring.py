# SPDX-License-Identifier: Apache-2.0
"""The shared-memory ring: what goes in comes out once and whole, nothing waits for ever, junk is refused."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_usage import wakes_of
from ring_producer import message, write
from support.raw_frames import HEADER, NOTE, Frame, cut, put_frame

from adaptra_megatron.common import handshake
from adaptra_megatron.transport import _ring
from adaptra_megatron.transport._ring import (
    Description,
    Event,
    FrameError,
    Inbox,
    Ring,
    RingClosedError,
    RingError,
    RingWatch,
)
from testing.waiting import until

SLOT = 4096
HEADERS = 4096
"""Where the frame headers start; see csrc/ring/ring.cpp."""


def inbox(*, most: int = 1 << 30) -> Inbox:
    return Inbox(max_message_nbytes=most, pooled_nbytes=1 << 26)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def number_of(path: str) -> int:
    return len(os.listdir(path))


def everything(box: Inbox, ring: Ring) -> list[Event]:
    """All events of a closed ring."""
    events: list[Event] = []
    with contextlib.suppress(RingClosedError):
        while (event := box.next(ring, soon())) is not None:
            events.append(event)
    return events


@contextlib.contextmanager
def memory_of(ring: Ring) -> Iterator[mmap.mmap]:
    """The ring as a process that means harm sees it."""
    with mmap.mmap(ring.fd, 0) as memory:
        yield memory


def test_a_message_comes_out_as_it_went_in() -> None:
    ring, box = Ring.create(8, SLOT), inbox()
    content = numpy.arange(3 * SLOT + 5, dtype=numpy.uint8)
    before_s = time.monotonic()
    write(ring, 0, content)
    event = box.next(ring, soon())
    assert event is not None
    assert event.kind == Event.Kind.MESSAGE
    names = ("sequence", "iteration", "direction", "chunk", "micro_batch", "dtype", "shape")
    assert [getattr(event, name) for name in names] == [0, 0, 0, 0, 0, _ring.DATA_TYPES["uint8"], [content.size]]
    assert bytes(event.payload) == content.tobytes()
    assert before_s <= event.arrived_s <= time.monotonic()


@given(st.lists(st.integers(0, 5 * SLOT), max_size=12), st.sampled_from([2, 4, 8]))
def test_any_sizes_come_out_in_order(sizes: list[int], slots: int) -> None:
    ring, box = Ring.create(slots, SLOT), inbox()
    contents = [numpy.full(size, number + 1, numpy.uint8) for number, size in enumerate(sizes)]
    writer = threading.Thread(target=lambda: [write(ring, n, content) for n, content in enumerate(contents)])
    writer.start()
    for content in contents:
        event = box.next(ring, soon())
        assert event is not None
        assert bytes(event.payload) == content.tobytes()
    writer.join(10.0)
    assert ring.backlog == 0


@settings(max_examples=25)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_a_message_sent_again_comes_out_once(numbers: list[int]) -> None:
    ring, box = Ring.create(128, SLOT), inbox()
    content = numpy.arange(2 * SLOT, dtype=numpy.uint8)
    for number in numbers:
        write(ring, number, content)
    ring.close()
    events = everything(box, ring)
    fresh = [event.sequence for event in events if event.kind == Event.Kind.MESSAGE]
    again = [event.sequence for event in events if event.kind == Event.Kind.REPEATED]
    assert fresh == list(dict.fromkeys(numbers))
    assert sorted(fresh + again) == sorted(numbers)
    assert box.doubles == len(again)


def test_who_reads_goes_on_once_what_came_again_has_been_dropped() -> None:
    """It has to acknowledge then what it put off while there was more in the ring."""
    ring, again, box, content = Ring.create(8, SLOT), Ring.create(8, SLOT), inbox(), numpy.zeros(3 * SLOT, numpy.uint8)
    write(ring, 0, content)
    assert box.next(ring, soon()) is not None
    write(again, 0, content)
    event, deadline_s = box.next(again, soon()), soon()
    assert event is not None
    assert (event.kind, again.backlog) == (Event.Kind.REPEATED, 2)
    assert box.next(again, deadline_s) is None
    assert time.monotonic() < deadline_s
    assert again.backlog == 0


def test_a_message_begun_in_one_ring_is_finished_by_the_next() -> None:
    broken, fresh, box = Ring.create(2, SLOT), Ring.create(8, SLOT), inbox()
    content = numpy.random.default_rng(1).integers(0, 256, 4 * SLOT, dtype=numpy.uint8)
    with pytest.raises(TimeoutError):
        write(broken, 0, content, deadline_s=time.monotonic())
    broken.close()
    with pytest.raises(RingClosedError):
        box.next(broken, soon())
    write(fresh, 0, content)
    event = box.next(fresh, soon())
    assert event is not None
    assert bytes(event.payload) == content.tobytes()
    assert fresh.backlog == 0


def test_acknowledgements_travel_alike() -> None:
    ring, box = Ring.create(8, SLOT), inbox()
    ring.write_ack(41, soon())
    ring.write_bye(soon())
    events = [box.next(ring, soon()) for _ in range(2)]
    assert [event.kind for event in events if event] == [Event.Kind.ACK, Event.Kind.BYE]
    assert events[0] is not None
    assert events[0].sequence == 41


def test_no_wait_outlasts_its_deadline() -> None:
    ring, box = Ring.create(2, SLOT), inbox()
    start_s = time.monotonic()
    assert box.next(ring, start_s + 0.1) is None
    with pytest.raises(TimeoutError):
        write(ring, 0, numpy.zeros(3 * SLOT, numpy.uint8), deadline_s=time.monotonic() + 0.1)
    assert 0.2 <= time.monotonic() - start_s < 10.0
    assert box.next(ring, time.monotonic() - 1.0) is None, "an expired deadline is not an endless one"


@pytest.mark.parametrize("full", [False, True])
def test_closing_wakes_waiting_threads(full: bool) -> None:
    ring, box = Ring.create(2, SLOT), inbox()
    if full:
        write(ring, 0, numpy.zeros(2 * SLOT, numpy.uint8))
    threading.Timer(0.1, ring.close).start()
    start_s = time.monotonic()
    with pytest.raises(RingClosedError):
        write(ring, 1, numpy.zeros(1, numpy.uint8)) if full else box.next(ring, soon())
    assert time.monotonic() - start_s < 5.0


def test_waiting_costs_no_cpu() -> None:
    ring, box = Ring.create(2, SLOT), inbox()
    before_s = time.process_time()
    assert box.next(ring, time.monotonic() + 0.5) is None
    assert time.process_time() - before_s < 0.1, "of half a second of waiting"


@pytest.mark.parametrize(("slots", "slot_nbytes"), [(0, 4096), (3, 4096), (8192, 4096), (8, 100), (8, 1 << 27)])
def test_impossible_rings_are_refused(slots: int, slot_nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Ring.create(slots, slot_nbytes)


def test_only_rings_are_attached() -> None:
    ring = Ring.create(4, SLOT)
    Ring.attach(ring.fd)
    unsealed = os.memfd_create("not-a-ring", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 1 << 16)
    with pytest.raises(RingError, match="sealed"):
        Ring.attach(unsealed)
    os.close(unsealed)
    for offset in (0, 8, 12, 16):
        other = Ring.create(4, SLOT)
        with memory_of(other) as memory:
            memory[offset] ^= 0x55
        with pytest.raises(RingError, match="same version"):
            Ring.attach(other.fd)


def test_a_ring_cannot_be_executed_where_the_kernel_lets_it_be_said() -> None:
    try:
        os.close(os.memfd_create("looking", 8))  # MFD_NOEXEC_SEAL
    except OSError:
        pytest.skip("a kernel before 6.3")
    ring = Ring.create(4, SLOT)
    assert not os.fstat(ring.fd).st_mode & 0o111
    with pytest.raises(PermissionError):
        os.fchmod(ring.fd, 0o777)
    Ring.attach(ring.fd)


def test_another_header_has_versions_of_its_own() -> None:
    with memory_of(Ring.create(2, SLOT)) as memory:
        of_rings = int.from_bytes(memory[8:12], "little")
    assert (HEADER.format, of_rings, handshake.VERSION) == ("<IBBBBQqIIQQQ8QQ", 3, 4), "raise both versions with it"


# Byte of the header, and what is written there: see FrameHeader in csrc/ring/frame.hpp.
SPOILT = {
    "magic": (0, b"XXXX"),
    "kind": (4, b"\x09"),
    "direction": (5, b"\x03"),
    "dtype": (6, b"\x63"),
    "dimensions": (7, b"\x09"),
    "iteration": (16, b"\xff" * 8),
    "total": (32, (1 << 40).to_bytes(8, "little")),
    "offset": (40, (1 << 20).to_bytes(8, "little")),
    "payload beyond the slot": (48, (SLOT + 1).to_bytes(8, "little")),
    "payload beyond the message": (48, (200).to_bytes(8, "little")),
    "empty payload": (48, bytes(8)),
    "shape": (56, (101).to_bytes(8, "little")),
    "shape that overflows": (56, (1 << 63).to_bytes(8, "little")),
    "reserved": (120, b"\x01"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_frames_are_refused_before_anything_is_used(what: str) -> None:
    ring, box = Ring.create(4, SLOT), inbox(most=1 << 20)
    write(ring, 0, numpy.zeros(100, numpy.uint8))
    offset, junk = SPOILT[what]
    with memory_of(ring) as memory:
        memory[HEADERS + offset : HEADERS + offset + len(junk)] = junk
    with pytest.raises(FrameError):
        box.next(ring, soon())


@given(st.binary(min_size=128, max_size=128))
def test_random_headers_never_do_harm(header: bytes) -> None:
    ring, box = Ring.create(4, SLOT), inbox(most=1 << 20)
    write(ring, 0, numpy.zeros(100, numpy.uint8))
    with memory_of(ring) as memory:
        memory[HEADERS + 4 : HEADERS + 128] = header[4:]  # with the right magic number: most of it is looked at
    with contextlib.suppress(FrameError):
        box.next(ring, time.monotonic() + 0.001)


def test_counters_that_cannot_be_are_an_error() -> None:
    ring, box = Ring.create(4, SLOT), inbox()
    with memory_of(ring) as memory:
        memory[64:72] = (1 << 60).to_bytes(8, "little")  # published slots
    with pytest.raises(RingError, match="more slots than there are"):
        box.next(ring, soon())


def test_parts_of_different_messages_do_not_mix() -> None:
    ring, box = Ring.create(2, SLOT), inbox()
    with pytest.raises(TimeoutError):
        write(ring, 0, numpy.zeros(3 * SLOT, numpy.uint8), deadline_s=time.monotonic())
    assert box.next(ring, time.monotonic()) is None
    write(ring, 0, numpy.zeros(2 * SLOT, numpy.uint8))
    with pytest.raises(FrameError, match="different messages"):
        box.next(ring, soon())


@pytest.mark.parametrize(
    ("total", "parts"),
    [
        (20, [(0, 10), (5, 10)]),
        (20, [(0, 10), (10, 10)]),
        (2 * SLOT, [(0, SLOT), (SLOT // 2, SLOT)]),
        (2 * SLOT, [(SLOT, SLOT), (1, SLOT)]),
        (2 * SLOT, [(0, SLOT), (SLOT, SLOT - 1)]),
        (2 * SLOT, [(0, SLOT - 1), (SLOT, SLOT)]),
        (2 * SLOT + 1, [(0, SLOT), (SLOT, SLOT), (SLOT + 1, SLOT)]),
        (1 << 30, [(at << 21, 1) for at in range(512)]),
    ],
)
def test_frames_that_overlap_or_leave_a_gap_are_refused(total: int, parts: list[tuple[int, int]]) -> None:
    ring, box = Ring.create(1024, SLOT), inbox()
    for offset, nbytes in parts:
        put_frame(ring, Frame(sequence=0, total_nbytes=total, offset=offset, payload=b"x" * nbytes))
    with pytest.raises(FrameError, match="slot"):
        box.next(ring, time.monotonic())


def test_a_message_goes_on_in_slots_of_the_size_it_began_in() -> None:
    ring, larger, box = Ring.create(4, SLOT), Ring.create(4, 2 * SLOT), inbox()
    content = bytes(range(256)) * (4 * SLOT // 256)
    put_frame(ring, cut(0, content, SLOT)[1])
    assert box.next(ring, time.monotonic()) is None
    put_frame(larger, cut(0, content, 2 * SLOT)[0])
    with pytest.raises(FrameError, match="slots"):
        box.next(larger, time.monotonic())


@pytest.mark.parametrize("direction", [0, NOTE])
def test_what_is_begun_and_not_finished_is_bounded_by_the_window(direction: int) -> None:
    """As its sender does: one message may be larger than the window, and lanes change the order in which they begin."""
    ring, box = Ring.create(64, SLOT), Inbox(max_message_nbytes=1 << 40, pooled_nbytes=0, window_nbytes=8 * SLOT)
    contents = [bytes([number]) * (size * SLOT) for number, size in enumerate([100, 2, 2, 2, 2])]
    for number in range(4):
        put_frame(ring, cut(number, contents[number], SLOT, direction=direction)[0])
    assert box.next(ring, time.monotonic()) is None
    put_frame(ring, cut(7, contents[4], SLOT, direction=NOTE - direction)[0])  # notes and probes: a window of their own
    assert box.next(ring, time.monotonic()) is None
    put_frame(ring, cut(3, contents[3], SLOT, direction=direction)[1])
    event = box.next(ring, time.monotonic())
    assert event is not None
    assert bytes(event.payload) == contents[3]
    for number in (4, 5):
        put_frame(ring, cut(number, contents[4], SLOT, direction=direction)[0])
    with pytest.raises(FrameError, match="under way"):
        box.next(ring, time.monotonic())


def test_memory_is_used_again_and_let_go() -> None:
    ring, box = Ring.create(8, SLOT), inbox()
    addresses = []
    for number in range(3):
        write(ring, number, numpy.zeros(2 * SLOT, numpy.uint8))
        event = box.next(ring, soon())
        assert event is not None
        addresses.append(numpy.frombuffer(event.payload, numpy.uint8).ctypes.data)
        del event
    assert len(set(addresses)) == 1
    descriptors = number_of("/proc/self/fd")
    for _ in range(20):
        one = Ring.create(8, SLOT)
        other = Ring.attach(one.fd)
        del one, other
    assert number_of("/proc/self/fd") == descriptors


@pytest.mark.parametrize(
    ("slots", "slot_nbytes", "messages", "largest"), [(2, 4096, 1500, 20_000), (16, 65536, 300, 2_000_000)]
)
def test_two_processes_under_load(slots: int, slot_nbytes: int, messages: int, largest: int) -> None:
    ring, box, seed = Ring.create(slots, slot_nbytes), inbox(), slots
    producer = Path(__file__).with_name("ring_producer.py")
    command = [sys.executable, producer, str(ring.fd), str(seed), str(messages), str(largest)]
    with subprocess.Popen(command, pass_fds=[ring.fd]) as process:
        try:
            for number in range(messages):
                event = box.next(ring, soon(30.0))
                assert event is not None, f"message {number} did not come"
                assert event.sequence == number
                assert bytes(event.payload) == message(seed, number, largest).tobytes(), f"message {number} differs"
            with pytest.raises(RingClosedError):
                box.next(ring, soon(30.0))
            assert process.wait(10.0) == 0
        finally:
            process.kill()


def test_a_killed_producer_hangs_no_reader() -> None:
    ring, box = Ring.create(2, SLOT), inbox()
    producer = Path(__file__).with_name("ring_producer.py")
    command = [sys.executable, producer, str(ring.fd), "1", "1000000", "100000"]
    with subprocess.Popen(command, pass_fds=[ring.fd]) as process:
        assert box.next(ring, soon(20.0)) is not None
        process.kill()
        process.wait(5.0)
    received = 1
    while box.next(ring, time.monotonic() + 0.2) is not None:
        received += 1
    assert received < 1_000_000


def test_memory_of_a_size_no_longer_asked_for_makes_room() -> None:
    ring, box = Ring.create(16, SLOT), Inbox(max_message_nbytes=1 << 20, pooled_nbytes=16 * SLOT)
    numbers = itertools.count()

    def receive(nbytes: int) -> Event:
        write(ring, next(numbers), numpy.zeros(nbytes, numpy.uint8))
        event = box.next(ring, soon())
        assert event is not None
        return event

    together = [receive(4 * SLOT) for _ in range(4)]
    together.clear()  # the pool is full of these
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(50):
        receive(12 * SLOT)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 50 * 12 / 2, f"{faults} page faults: memory was mapped anew for each message"


def test_filled_slots_wake_only_the_thread_that_attends_until_it_leaves() -> None:
    ring, box, watch = Ring.create(8, SLOT), inbox(), RingWatch()
    served: list[int] = []

    def serve_all() -> None:
        while (delivery := watch.next([(box, ring)], soon())) is not None:
            event = delivery.event()
            assert event is not None
            served.append(event.sequence)

    other = threading.Thread(target=serve_all)
    other.start()
    time.sleep(0.1)
    task = Path(f"/proc/self/task/{other.native_id}")
    assert box.next(ring, time.monotonic() + 0.01, stays=True) is None
    before = wakes_of(task)
    for number in range(50):
        write(ring, number, numpy.zeros(3 * SLOT, numpy.uint8))
        time.sleep(0.002)  # not in `next`, and yet what arrives is left to this thread
        event = box.next(ring, soon(), stays=True)
        assert event is not None
        assert event.sequence == number
    woken = wakes_of(task) - before
    assert woken < 25, f"the other thread woke {woken} times, though this one was to read all"
    write(ring, 50, numpy.zeros(SLOT, numpy.uint8))
    time.sleep(0.1)
    assert not served
    box.leave()
    until(lambda: served == [50], lambda: f"it read {served}")
    second = Ring.create(8, SLOT)
    assert box.next(ring, time.monotonic() + 0.01, stays=True) is None
    assert box.next(second, time.monotonic() + 0.01) is None  # leaves both
    write(ring, 51, numpy.zeros(SLOT, numpy.uint8))
    until(lambda: served == [50, 51], lambda: f"it read {served}")
    watch.wake()
    other.join(5.0)
    assert not other.is_alive()


def test_a_poke_releases_all_that_wait() -> None:
    ring, box = Ring.create(8, SLOT), inbox()
    seen = ring.pokes
    waiting = [threading.Thread(target=box.next, args=(ring, soon(), seen)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    ring.poke()
    for thread in waiting:
        thread.join(5.0)
        assert not thread.is_alive()


def described(number: int, nbytes: int, *, micro_batch: int | None = None) -> Description:
    return Description(
        sequence=number,
        iteration=0,
        direction=0,
        chunk=0,
        micro_batch=number if micro_batch is None else micro_batch,
        dtype=_ring.DATA_TYPES["uint8"],
        shape=[nbytes],
    )


def test_slots_that_follow_one_another_are_claimed_together() -> None:
    ring = Ring.create(8, SLOT)
    assert ring.claim_slots(3, 0.0) == (0, 3)
    assert ring.claim_slots(9, 0.0) == (3, 5), "no more than there are"
    assert ring.claim_slots(1, time.monotonic() + 0.01) == (0, 0), "none at the deadline"
    for first, count in ((0, 3), (3, 5)):
        ring.commit_void(first, count)
    for index in range(6):
        ring.take_frame(0.0)
        ring.release_frame(index)
    assert ring.claim_slots(9, 0.0) == (8, 6)
    ring.commit_void(8, 6)
    for _ in range(8):
        ring.take_frame(0.0)
    ring.release_frames(6, 6)
    assert ring.claim_slots(9, 0.0) == (14, 2), "not over the end of the memory"
    ring.close()
    with pytest.raises(RingClosedError):
        ring.claim_slots(1, 0.0)


def test_frames_that_hardware_filled_are_a_message() -> None:
    ring, box = Ring.create(8, SLOT), inbox()
    content = numpy.random.default_rng(2).integers(0, 256, 3 * SLOT + 7, dtype=numpy.uint8)
    memory = numpy.frombuffer(ring, dtype=numpy.uint8)
    assert memory.ctypes.data == ring.slots_address
    claimed = [ring.claim_slots(2, 0.0) for _ in range(2)]
    ring.write_ack(9, 0.0)
    for (first, count), offset in reversed(list(zip(claimed, (0, 2 * SLOT), strict=True))):
        part = content[offset : offset + count * SLOT]
        payload = ring.slot_offsets(first)[1]
        memory[payload : payload + part.size] = part
        assert box.next(ring, 0.0) is None, "in the order of claiming"
        ring.commit_frames(first, count, described(0, content.size), offset, content.size)
    event = box.next(ring, soon())
    assert event is not None
    assert bytes(event.payload) == content.tobytes()
    acknowledgement = box.next(ring, soon())
    assert acknowledgement is not None
    assert acknowledgement.kind == Event.Kind.ACK
    first, count = ring.claim_slots(2, 0.0)
    with pytest.raises(FrameError):
        ring.commit_frames(first, count, described(1, SLOT), 0, SLOT)  # one slot is all it needs


class Parts:
    """What comes out of an inbox by parts."""

    def __init__(self) -> None:
        self.box = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=1 << 26, for_device=True)
        self.messages: dict[int, numpy.ndarray] = {}
        self.missing: dict[int, int] = {}
        self.lent: list[tuple[Ring, int, int]] = []
        self.sizes: list[int] = []

    def take(self, ring: Ring) -> Event | None:
        event = self.box.next(ring, 0.0)
        if event is None or event.kind != Event.Kind.PART:
            return event
        message = self.messages.setdefault(event.sequence, numpy.zeros(event.total_nbytes, numpy.uint8))
        payload = ring.slot_offsets(event.first_slot)[1]
        source = numpy.frombuffer(ring, dtype=numpy.uint8)[payload : payload + event.nbytes]
        message[event.offset : event.offset + event.nbytes] = source
        self.missing[event.sequence] = self.missing.get(event.sequence, event.total_nbytes) - event.nbytes
        self.lent.append((ring, event.first_slot, event.slots))
        self.sizes.append(event.slots)
        return event

    def release(self) -> None:
        for ring, first, count in self.lent:
            ring.release_frames(first, count)
        self.lent.clear()

    def ask(self, micro_batch: int, iteration: int = 0) -> None:
        self.box.ask(iteration=iteration, direction=0, chunk=0, micro_batch=micro_batch)


def write_described(ring: Ring, number: int, content: numpy.ndarray, **named: int) -> None:
    ring.write(described(number, content.size, **named), content.ctypes.data, content.nbytes, time.monotonic() + 0.01)


def test_what_was_asked_for_stays_in_the_ring_until_it_is_released() -> None:
    ring, parts = Ring.create(8, SLOT), Parts()
    content = numpy.random.default_rng(3).integers(0, 256, 5 * SLOT + 1, dtype=numpy.uint8)
    parts.ask(0)
    write_described(ring, 0, content)
    while (event := parts.take(ring)) is not None:
        assert (event.sequence, event.total_nbytes, event.shape) == (0, content.size, [content.size])
    assert parts.sizes == [2, 2, 2], "frames that lie together, but not all the ring at once"
    assert parts.missing == {0: 0}
    assert numpy.array_equal(parts.messages[0], content)
    assert ring.backlog == 0, "all is taken"
    with pytest.raises(TimeoutError):
        write_described(ring, 1, content)
    parts.release()
    write_described(ring, 2, content[:SLOT])


def test_what_was_not_asked_for_is_put_together_in_memory() -> None:
    ring, parts = Ring.create(8, SLOT), Parts()
    content = numpy.arange(SLOT + 1, dtype=numpy.uint8)
    parts.ask(7)
    parts.ask(8)
    write_described(ring, 0, content, micro_batch=6)
    write_described(ring, 1, content[:0], micro_batch=7)
    events = [parts.take(ring) for _ in range(2)]
    assert [event and event.kind for event in events] == [Event.Kind.MESSAGE] * 2, "nothing has no parts"
    assert events[0] is not None
    assert bytes(events[0].payload) == content.tobytes()
    assert events[0].block_nbytes >= content.size
    assert events[0].block_nbytes % mmap.PAGESIZE == 0
    parts.ask(0, iteration=1)
    write_described(ring, 2, content, micro_batch=8)
    late = parts.take(ring)
    assert late is not None
    assert late.kind == Event.Kind.MESSAGE, "of an iteration that is over"


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_each_byte_of_a_message_comes_out_once_over_rings_that_break(steps: list[tuple[int, bool, bool]]) -> None:
    contents = [numpy.random.default_rng(number).integers(0, 256, 5 * SLOT, dtype=numpy.uint8) for number in range(4)]
    ring, parts = Ring.create(4, SLOT), Parts()
    for number in range(0, 4, 2):
        parts.ask(number)
    whole: dict[int, bytes] = {}

    def read() -> None:
        with contextlib.suppress(RingClosedError):
            while (event := parts.take(ring)) is not None:
                if event.kind == Event.Kind.MESSAGE:
                    assert event.sequence not in whole
                    whole[event.sequence] = bytes(event.payload)

    for number, releases, breaks in steps:
        with contextlib.suppress(TimeoutError):  # a part is in the ring then
            ring.write(described(number, 5 * SLOT), contents[number].ctypes.data, 5 * SLOT, 0.0)
        read()
        if releases:
            parts.release()
        if breaks:
            ring.close()
            read()
            ring = Ring.create(4, SLOT)
    for number, content in enumerate(contents):  # a last session, in which all goes well
        ring = Ring.create(8, SLOT)
        write_described(ring, number, content)
        read()
        if number % 2:
            assert whole[number] == content.tobytes()
        else:
            assert parts.missing[number] == 0
            assert numpy.array_equal(parts.messages[number], content)


@pytest.mark.parametrize("for_device", [True, False])
def test_a_forked_child_has_no_memory_that_a_device_reads(for_device: bool) -> None:
    ring = Ring.create(8, SLOT)
    box = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=1 << 26, for_device=for_device)
    write(ring, 0, numpy.zeros(2 * SLOT, numpy.uint8))
    event = box.next(ring, soon())
    assert event is not None
    address = numpy.frombuffer(event.payload, numpy.uint8).ctypes.data

    def mapped() -> bool:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)

    child = os.fork()
    if child == 0:
        os._exit(3 if mapped() else 4)
    _process, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (4 if for_device else 3)
    assert mapped()
