# SPDX-License-Identifier: Apache-2.0
"""A ring in use, with both pumps behind it, while another thread overwrites its counts, headers and payloads.

What comes out means nothing then. But nothing may crash, outlast its deadline, or end otherwise than by an error that
says so. The same case writes the same values, though not at the same moments.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
import time
from collections.abc import Callable
from random import Random

from adaptra_megatron.transport._ring import (
    DATA_TYPES,
    Description,
    Inbox,
    PumpCounters,
    Ring,
    receive_frames,
    send_frames,
)
from fuzz.mutations import number

SLOT = 4096
LASTS_S = 0.05
COUNTERS_NBYTES = 256
"""csrc/ring's Ring::Shared is smaller."""
PATIENCE_S = 8.0
"""A pump that waits looks at its ring every 5 s."""
ERRORS = (RuntimeError, ValueError, TimeoutError, MemoryError)
"""RingError and RingClosedError, FrameError, a full ring, a message that is said to be huge."""


def case(random: Random, deadline_s: float) -> int:
    """For a while; then everything ends by closing both rings."""
    slots = random.choice((2, 4, 16))
    first, second = Ring.create(slots, SLOT), Ring.create(slots, SLOT)
    box = Inbox(max_message_nbytes=1 << 20, pooled_nbytes=1 << 20, window_nbytes=1 << 18)
    content = ctypes.create_string_buffer(random.randrange(1, 6 * SLOT))
    numbers = iter(range(1 << 30))
    over = threading.Event()
    ours, theirs = socket.socketpair()
    closed: list[str] = []

    def write() -> None:
        description = Description(
            sequence=next(numbers),
            iteration=0,
            direction=0,
            chunk=0,
            micro_batch=0,
            dtype=DATA_TYPES["uint8"],
            shape=[len(content)],
        )
        first.write(description, ctypes.addressof(content), len(content), time.monotonic() + 0.01)

    def read() -> None:
        event = box.next(second, time.monotonic() + 0.01, None, random.random() < 0.5)
        if event is not None and event.kind == event.Kind.MESSAGE:
            bytes(event.payload)
        if random.random() < 0.2:
            box.leave()

    def pump_out() -> None:
        closed.append(send_frames(first, ours.fileno(), PumpCounters()))
        over.wait(0.001)

    def pump_in() -> None:
        closed.append(receive_frames(second, theirs.fileno(), 1 << 20, 0.05, PumpCounters()))
        over.wait(0.001)

    writes = _writes(random, slots)
    victims = [ring for ring in (first, second) if random.random() < 0.7] or [first]
    threads = [threading.Thread(target=_again, args=(work, over)) for work in (write, read, pump_out, pump_in)]
    with ours, theirs:
        for thread in threads:
            thread.start()
        count = _overwrite(victims, writes, time.monotonic() + LASTS_S)
        over.set()
        wakes = random.random() < 0.9  # else who sleeps may not be woken, and looks at its ring some seconds later
        for ring in (first, second):
            _end(ring, wakes)
        for end in (ours, theirs):
            end.shutdown(socket.SHUT_RDWR)
        end_s = min(deadline_s, time.monotonic() + PATIENCE_S)
        for thread in threads:
            thread.join(end_s - time.monotonic())
            assert not thread.is_alive(), f"{thread.name} outlasts its deadline"
    return count


def _again(work: Callable[[], None], over: threading.Event) -> None:
    while not over.is_set():
        try:
            work()
        except ERRORS:
            over.wait(0.0005)


def _writes(random: Random, slots: int) -> list[tuple[int, int, int]]:
    """Offset, size and value of what is written, again and again."""
    places = [("counters", 0.4), ("headers", 0.5), ("payloads", 0.1)]
    writes = []
    for _ in range(256):
        (place, _weight), nbytes = random.choices(places, [weight for _, weight in places])[0], random.choice((1, 4, 8))
        begin, end = {
            "counters": (0, COUNTERS_NBYTES),
            "headers": (4096, 4096 + slots * 128),
            "payloads": (8192, 8192 + slots * SLOT),
        }[place]
        writes.append((random.randrange(begin, end - 8) // nbytes * nbytes, nbytes, number(random) % (1 << 8 * nbytes)))
    return writes


def _overwrite(victims: list[Ring], writes: list[tuple[int, int, int]], until_s: float) -> int:
    memories = [mmap.mmap(ring.fd, 0) for ring in victims]
    count = 0
    while time.monotonic() < until_s:
        for offset, nbytes, value in writes:
            for memory in memories:
                memory[offset : offset + nbytes] = value.to_bytes(nbytes, "little")
            count += len(memories)
            if count % 16 == 0:
                time.sleep(0)  # the others need the interpreter, too
    for memory in memories:
        memory.close()
    return count


def _end(ring: Ring, wakes: bool) -> None:
    """Close a ring. `wakes`: after its doorbells were set as if a thread waited, whatever was written there."""
    if wakes:
        with mmap.mmap(ring.fd, 0) as memory:
            for waiting in (76, 140):
                memory[waiting : waiting + 4] = b"\x01\0\0\0"
    ring.close()
