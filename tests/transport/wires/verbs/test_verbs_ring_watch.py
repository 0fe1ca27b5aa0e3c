# SPDX-License-Identifier: Apache-2.0
"""A ring seen from an event loop: nothing is lost or doubled, and a thread waits for it only if asked to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from adaptra_megatron.transport._ring import FrameError, Ring
from adaptra_megatron.transport.wires.verbs.verbs_wire import RingWatch

SLOTS, LIMIT_S = 4, 10.0
Frames = RingWatch[tuple[int, int]]


def run(body: Callable[[Ring, Frames, asyncio.Event], Awaitable[None]]) -> None:
    """With the frames of a ring, and an event that is set when there is something to pull after a watch."""

    async def main() -> None:
        ring, came = Ring.create(SLOTS, 4096), asyncio.Event()
        watch = RingWatch(ring, ring.take_frame, came.set)
        try:
            await asyncio.wait_for(body(ring, watch, came), LIMIT_S)
        finally:
            ring.close()
            await asyncio.wait_for(watch.stop(), LIMIT_S)

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verbs-")]


def fill(ring: Ring, frames: int) -> None:
    for number in range(frames):
        ring.write_ack(number, time.monotonic() + LIMIT_S)


def empty(ring: Ring, pulled: list[tuple[int, int]]) -> list[int]:
    for index, _nbytes in pulled:
        ring.release_frame(index)
    return [index for index, _nbytes in pulled]


def test_what_is_there_is_pulled_without_waiting() -> None:
    async def body(ring: Ring, watch: Frames, came: asyncio.Event) -> None:
        assert watch.pull() == []
        fill(ring, 3)
        assert empty(ring, watch.pull()) == [0, 1, 2]
        assert watch.pull() == []
        fill(ring, 1)
        await asyncio.sleep(0.05)
        assert not came.is_set(), "no notice was asked for"
        assert not watch.over

    run(body)


def test_what_comes_later_is_told_and_pulled_in_order() -> None:
    async def body(ring: Ring, watch: Frames, came: asyncio.Event) -> None:
        pulled: list[int] = []
        for _ in range(5):
            assert watch.pull() == []
            watch.watch()
            watch.watch()  # once is enough
            await asyncio.sleep(0.02)
            assert not came.is_set()
            fill(ring, 3)
            assert watch.pull() == [], "the thread has the first of them"
            await came.wait()
            came.clear()
            pulled += empty(ring, watch.pull())
        assert pulled == list(range(15))

    run(body)


@pytest.mark.parametrize("watching", [False, True])
def test_a_closed_ring_is_over_once_it_is_empty(watching: bool) -> None:
    async def body(ring: Ring, watch: Frames, came: asyncio.Event) -> None:
        if watching:
            watch.watch()
            ring.close()
            await came.wait()
        else:
            fill(ring, 2)
            ring.close()
        assert not watch.over
        assert empty(ring, watch.pull()) == ([] if watching else [0, 1])
        assert watch.over
        came.clear()
        watch.watch()
        await asyncio.sleep(0.05)
        assert not came.is_set(), "there is nothing to wait for any more"

    run(body)


@pytest.mark.parametrize("watching", [False, True])
def test_a_spoilt_ring_is_an_error_where_it_is_pulled(watching: bool) -> None:
    async def body(ring: Ring, watch: Frames, came: asyncio.Event) -> None:
        if watching:
            watch.watch()
        ring.commit_slot(ring.claim_slot(0.0) or 0)  # published, but never filled
        if watching:
            await came.wait()
        with pytest.raises(FrameError):
            watch.pull()

    run(body)


def test_stopping_while_the_thread_waits() -> None:
    async def body(_ring: Ring, watch: Frames, _came: asyncio.Event) -> None:
        watch.watch()
        await asyncio.sleep(0.02)

    begun_s = time.monotonic()
    run(body)
    assert time.monotonic() - begun_s < LIMIT_S / 2
