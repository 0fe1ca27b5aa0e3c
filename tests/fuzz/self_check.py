# SPDX-License-Identifier: Apache-2.0
"""Reads beyond a buffer by the ring's native code, which a sanitizer must stop: else a campaign would see nothing."""

from __future__ import annotations

import ctypes
import time
from random import Random

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Ring

_NBYTES = 1 << 16


def case(random: Random, deadline_s: float) -> int:
    """Never returns where AddressSanitizer watches."""
    buffer = ctypes.create_string_buffer(_NBYTES)
    beyond = _NBYTES + random.randrange(1, 64)
    description = Description(
        sequence=0, iteration=0, direction=0, chunk=0, micro_batch=0, dtype=DATA_TYPES["uint8"], shape=[beyond]
    )
    Ring.create(32, 4096).write(description, ctypes.addressof(buffer), beyond, time.monotonic())
    return 1
