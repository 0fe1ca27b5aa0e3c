# SPDX-License-Identifier: Apache-2.0
"""The other process of test_ring.py: `ring_producer.py FD SEED MESSAGES LARGEST` writes into the inherited ring FD.

Message n has a random size and content made of SEED and n; `message` makes the same in the test.
"""

from __future__ import annotations

import random
import sys
import time

import numpy

from adaptra_megatron.transport import _ring


def message(seed: int, number: int, largest: int) -> numpy.ndarray:
    generator = random.Random(f"{seed}:{number}")
    nbytes = generator.choice((0, 1, 4095, 4096, 4097, generator.randrange(largest)))
    return numpy.frombuffer(generator.randbytes(nbytes), numpy.uint8)


def write(ring: _ring.Ring, number: int, content: numpy.ndarray, *, deadline_s: float | None = None) -> None:
    description = _ring.Description(
        sequence=number,
        iteration=number // 7,
        direction=number % 2,
        chunk=number % 3,
        micro_batch=number,
        dtype=_ring.DATA_TYPES["uint8"],
        shape=[content.size],
    )
    deadline_s = time.monotonic() + 30.0 if deadline_s is None else deadline_s
    ring.write(description, content.ctypes.data, content.nbytes, deadline_s)


if __name__ == "__main__":
    fd, seed, messages, largest = map(int, sys.argv[1:])
    outbound = _ring.Ring.attach(fd)
    for index in range(messages):
        write(outbound, index, message(seed, index, largest))
    outbound.close()
