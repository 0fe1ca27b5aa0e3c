# SPDX-License-Identifier: Apache-2.0
"""Work on large schedules without Python's search for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """A schedule is hundreds of thousands of tuples and no cycle: looking for some takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
