# SPDX-License-Identifier: Apache-2.0
"""Ways to spoil bytes and numbers."""

from __future__ import annotations

from collections.abc import MutableSequence
from random import Random

INTERESTING = (0, 1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 4097, 8191, 8192, 1 << 16, 1 << 20)
EXTREMES = tuple(edge + by for edge in (1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 2) for by in (-1, 0, 1))
_SMALL = ((0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (24, 4), (28, 4))
FIELDS = (*_SMALL, *((offset, 8) for offset in (8, 16, 32, 40, 48, 120)))
"""Offset and size of each field of a frame's header, but for its shape: eight numbers of 8 bytes from byte 56 on."""
_SHAPE = tuple((56 + 8 * dimension, 8) for dimension in range(8))


def number(random: Random, near: int = 0) -> int:
    """A number of 64 bits that is likely to be treated in a way of its own."""
    choice = random.randrange(4)
    if choice == 0:
        return random.choice(INTERESTING)
    if choice == 1:
        return random.choice(EXTREMES) % (1 << 64)
    return (near + random.choice((-4096, -64, -8, -1, 1, 8, 64, 4096)) if choice == 2 else random.getrandbits(64)) % (
        1 << 64
    )


def spoil_header(random: Random, header: bytes) -> bytes:
    """A header with some fields of other values, or some bits flipped."""
    corrupted = bytearray(header)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if random.random() < 0.2:
            corrupted[random.randrange(len(corrupted))] ^= 1 << random.randrange(8)
            continue
        offset, nbytes = random.choice(FIELDS + _SHAPE[:3])
        before = int.from_bytes(corrupted[offset : offset + nbytes], "little")
        after = number(random, before) % (1 << 8 * nbytes)
        corrupted[offset : offset + nbytes] = after.to_bytes(nbytes, "little")
    return bytes(corrupted)


def spoil_stream(random: Random, stream: bytes) -> bytes:
    """A stream with bytes flipped, inserted, left out, repeated, or cut off."""
    corrupted = bytearray(stream)
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        at = random.randrange(len(corrupted) + 1)
        some = random.choice((1, 4, 8, 128, 4096, random.randrange(1, 300)))
        choice = random.randrange(5)
        if choice == 0 and at < len(corrupted):
            corrupted[at] ^= 1 << random.randrange(8)
        elif choice == 1:
            corrupted[at:at] = random.randbytes(some)
        elif choice == 2:
            del corrupted[at : at + some]
        elif choice == 3:
            corrupted[at:at] = corrupted[at : at + some]
        elif choice == 4:
            del corrupted[at:]
    return bytes(corrupted)


def spoil_list(random: Random, values: MutableSequence[object], replacement: object) -> None:
    """A list with a value replaced, left out, repeated, or changed with another."""
    at = random.randrange(len(values) + 1)
    choice = random.randrange(4)
    if choice == 0 or not values:
        values.insert(at, replacement)
        return
    at = min(at, len(values) - 1)
    other = random.randrange(len(values))
    if choice == 1:
        values[at] = replacement
    elif choice == 2:
        del values[at]
    else:
        values[at], values[other] = values[other], values[at]
