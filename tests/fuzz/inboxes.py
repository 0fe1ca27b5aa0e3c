# SPDX-License-Identifier: Apache-2.0
"""Frames into an Inbox, over one ring after the other: each is compared with what the reference makes of it."""

from __future__ import annotations

import time
from random import Random

from support.raw_frames import ACK, BYE, NOTE, VOID, Frame, cut, put

from adaptra_megatron.transport._ring import FrameError, Inbox, Ring
from fuzz.mutations import spoil_header
from fuzz.reference_inbox import ITEM_NBYTES, REFUSED, Outcome, ReferenceInbox, received, same

SLOT = 4096
MAX_MESSAGE_NBYTES = 1 << 20
WINDOW_NBYTES = 24 * SLOT
_FRAMES = 64

Bytes = tuple[bytes, bytes]
"""A header and the payload behind it."""


def some_message(random: Random, sequence: int, slot_nbytes: int = SLOT) -> list[Frame]:
    """The frames of a message of random size, type, shape and content."""
    dtype = random.choice(sorted(ITEM_NBYTES))
    item_nbytes = ITEM_NBYTES[dtype]
    slots = random.choice((0, 1, 1, 1, 2, 3, 5, 9, 40))
    nbytes = max(0, slots * slot_nbytes + random.choice((-slot_nbytes // 2, -item_nbytes, 0, 0)))
    nbytes -= nbytes % item_nbytes
    frames = cut(sequence, random.randbytes(64) * (nbytes // 64) + random.randbytes(nbytes % 64), slot_nbytes)
    rows = random.choice([rows for rows in (1, 2, 3, 4, 8) if nbytes // item_nbytes % rows == 0])
    shape = [rows, *[1] * random.randrange(7), nbytes // item_nbytes // rows]
    of_the_key = [random.choice((0, 1, NOTE)), random.randrange(9), random.randrange(3), random.randrange(9)]
    for frame in frames:
        frame.dtype, frame.shape = dtype, shape
        frame.direction, frame.iteration, frame.chunk, frame.micro_batch = of_the_key
    return frames


def case_of_headers(random: Random, deadline_s: float) -> int:
    """Good frames in order, most of their headers spoilt."""
    frames: list[Bytes] = []
    sequence = 0
    while len(frames) < _FRAMES:
        for frame in some_message(random, sequence):
            header = spoil_header(random, frame.header) if random.random() < 0.7 else frame.header
            frames.append((header, frame.payload))
        sequence += random.random() < 0.9
    _check_rings(random, [(SLOT, frames[:_FRAMES])])
    return _FRAMES


def case_of_parts(random: Random, deadline_s: float) -> int:
    """Messages whose parts come in any order, again, in the next ring, or not at all; few of them spoilt."""
    messages = [some_message(random, sequence) for sequence in random.sample(range(40), 8)]
    rings = []
    for _ in range(random.randrange(1, 5)):
        slot_nbytes = random.choice((SLOT,) * 9 + (2 * SLOT,))
        frames = [(frame.header, frame.payload) for frame in _sent_anyhow(random, messages)]
        rings.append((slot_nbytes, frames[: 4 * _FRAMES]))
    _check_rings(random, rings)
    return sum(len(frames) for _slot_nbytes, frames in rings)


def _sent_anyhow(random: Random, messages: list[list[Frame]]) -> list[Frame]:
    frames = [frame for message in messages if random.random() < 0.8 for frame in message]
    frames += random.sample(frames, len(frames) // 3)
    if random.random() < 0.7:
        random.shuffle(frames)
    for control in (ACK, BYE, VOID):
        frames.insert(random.randrange(len(frames) + 1), Frame(sequence=random.getrandbits(64), kind=control))
    for _ in range(random.choice((0, 0, 1, 3))):
        chosen = random.randrange(len(frames))
        frames[chosen] = _displaced(random, frames[chosen])
    return frames


def _displaced(random: Random, frame: Frame) -> Frame:
    """Another part of the message, or of another one of the same number."""
    moved = Frame(**vars(frame))
    if random.random() < 0.7:
        moved.offset = max(0, frame.offset + random.choice((-SLOT, -1, 1, 10, SLOT // 2, SLOT)))
    if random.random() < 0.5:
        moved.payload = random.randbytes(random.choice((1, 10, SLOT - 1, SLOT)))
    if random.random() < 0.2:
        moved.micro_batch += 1
    return moved


def _check_rings(random: Random, rings: list[tuple[int, list[Bytes]]]) -> None:
    """The frames through an Inbox and through the reference, ring by ring (slot size, and what comes in it)."""
    box = Inbox(max_message_nbytes=MAX_MESSAGE_NBYTES, pooled_nbytes=1 << 20, window_nbytes=WINDOW_NBYTES)
    reference = ReferenceInbox(MAX_MESSAGE_NBYTES, WINDOW_NBYTES)
    for slot_nbytes, frames in rings:
        ring = Ring.create(4 * _FRAMES, slot_nbytes)
        expected: list[Outcome | str] = []
        for header, payload in frames:
            in_slot = payload.ljust(slot_nbytes, b"\0")[:slot_nbytes]
            put(ring, header, in_slot)
            outcome = reference.take(header, in_slot, slot_nbytes)
            expected += [] if outcome is None else [outcome]
        check_heard(box, ring, expected)


def check_heard(box: Inbox, ring: Ring, expected: list[Outcome | str]) -> None:
    """What comes out of a ring without waiting is what is expected."""
    for number, outcome in enumerate(expected):
        found: Outcome | str
        try:
            event = box.next(ring, time.monotonic())
            assert event is not None, f"nothing came where {outcome} was to come, after {number} others"
            found = received(event)
        except FrameError:
            found = REFUSED
        assert same(found, outcome), f"after {number} others came\n{found}\nand not\n{outcome}"
    assert box.next(ring, time.monotonic()) is None, "more came than was to come"
