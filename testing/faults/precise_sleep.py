# SPDX-License-Identifier: Apache-2.0
"""Sleep until a point in time, without spinning: many ranks share few cores."""

from __future__ import annotations

import time


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s` of `time.monotonic()` or about 0.06 ms later (Linux's timer slack); at once if it has
    passed.
    """
    while (remaining_s := deadline_s - time.monotonic()) > 0:
        time.sleep(remaining_s)
