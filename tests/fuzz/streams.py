# SPDX-License-Identifier: Apache-2.0
"""Spoilt streams of frames over a socket into the pump that fills a ring, which an Inbox empties meanwhile."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from random import Random

from support.raw_frames import HEADER

from adaptra_megatron.transport._ring import (
    PEER_ENDED,
    FrameError,
    Inbox,
    PumpCounters,
    Ring,
    RingClosedError,
    receive_frames,
)
from fuzz.inboxes import MAX_MESSAGE_NBYTES, SLOT, WINDOW_NBYTES, some_message
from fuzz.mutations import spoil_header, spoil_stream
from fuzz.reference_inbox import REFUSED, Header, Outcome, ReferenceInbox, received, same

STALL_S = 0.02
"""Far less than a case may take, far more than bytes take that are there: not where their sender waits for room."""


def case(random: Random, deadline_s: float) -> int:
    """One stream over one connection."""
    frames = [frame for sequence in range(random.randrange(1, 6)) for frame in some_message(random, sequence)]
    headers = [spoil_header(random, frame.header) if random.random() < 0.05 else frame.header for frame in frames]
    stream = b"".join(header + frame.payload for header, frame in zip(headers, frames, strict=True))
    stream = spoil_stream(random, stream)
    stays = random.random() < 0.05
    ring = Ring.create(random.choice((2, 4, 64)), SLOT)
    text, found = _through_a_socket(ring, stream, stays, deadline_s)
    expected, orderly = _expected(stream)
    refused = REFUSED in expected
    expected = expected[: expected.index(REFUSED) + 1] if refused else expected
    assert len(found) == len(expected), f"{len(found)} outcomes, not {len(expected)}: {found[-1:]} {expected[-1:]}"
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert same(ours, theirs), f"after {number} others came\n{ours}\nand not\n{theirs}"
    if not stays and not refused:
        assert (text == PEER_ENDED) == orderly, f"the pump said {text!r} of a stream that ends well: {orderly}"
    return len(frames)


def _through_a_socket(ring: Ring, stream: bytes, stays: bool, deadline_s: float) -> tuple[str, list[Outcome | str]]:
    """What the pump said at its end, and what came out of the ring. `stays`: the peer does not hang up."""
    box = Inbox(max_message_nbytes=MAX_MESSAGE_NBYTES, pooled_nbytes=1 << 20, window_nbytes=WINDOW_NBYTES)
    said: list[str] = []
    ours, theirs = socket.socketpair()
    at_once = len(stream) < ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
    stall_s = (STALL_S if at_once else 0.5) if stays else 5.0

    def send() -> None:
        with contextlib.suppress(OSError):  # the pump has given up
            theirs.sendall(stream)
            if not stays:
                theirs.shutdown(socket.SHUT_WR)

    def receive() -> None:
        said.append(receive_frames(ring, ours.fileno(), MAX_MESSAGE_NBYTES, stall_s, PumpCounters()))
        ring.close()
        theirs.shutdown(socket.SHUT_RDWR)

    def stay() -> None:
        """Between two frames a pump waits for as long as its ring is open."""
        threads[0].join()
        while not said and (ring.backlog or select.select([ours], [], [], 0.0)[0]):
            time.sleep(0.001)
        time.sleep(10 * STALL_S)
        ring.close()
        ours.shutdown(socket.SHUT_RD)

    with ours, theirs:
        threads = [threading.Thread(target=work) for work in (send, receive, *([stay] if stays else []))]
        for thread in threads:
            thread.start()
        found = _everything(box, ring, deadline_s)
        for thread in threads:
            thread.join()
    return said[0], found


def _everything(box: Inbox, ring: Ring, deadline_s: float) -> list[Outcome | str]:
    found: list[Outcome | str] = []
    while True:
        try:
            event = box.next(ring, deadline_s)
        except RingClosedError:
            return found
        except FrameError:
            ring.close()  # as the delegate's process does: nothing of this ring is read any more
            return [*found, REFUSED]
        if event is None:
            assert time.monotonic() < deadline_s, "the pump neither fills the ring nor ends"
            continue  # frames that came again
        found.append(received(event))


def _expected(stream: bytes) -> tuple[list[Outcome | str], bool]:
    """What is to come out, and whether the stream ends between two frames and without one to refuse."""
    reference = ReferenceInbox(MAX_MESSAGE_NBYTES, WINDOW_NBYTES)
    expected: list[Outcome | str] = []
    at = 0
    while at + HEADER.size <= len(stream):
        raw = stream[at : at + HEADER.size]
        header = Header.of(raw)
        if not header.is_possible(SLOT, MAX_MESSAGE_NBYTES):
            return expected, False
        payload = stream[at + HEADER.size : at + HEADER.size + header.nbytes]
        if len(payload) < header.nbytes:
            return expected, False
        outcome = reference.take(raw, payload, SLOT)
        expected += [] if outcome is None else [outcome]
        at += HEADER.size + header.nbytes
    return expected, at == len(stream)
