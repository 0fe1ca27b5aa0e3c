# SPDX-License-Identifier: Apache-2.0
"""How long another process has given no sign of life, counted only while this one ran itself."""

from __future__ import annotations

from adaptra_megatron.launch.records import BEAT_S

MOST_AT_ONCE_S = 4 * BEAT_S
"""A process that was stopped, or kept from running by a busy machine, looks again late: that says nothing of others."""


class Silence:
    """Time without a new sign. Pure bookkeeping; times are given (seconds of the monotonic clock)."""

    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        self._last_s = now_s
        self._sign: object = None

    def observe(self, sign: object, now_s: float) -> float:
        """Look at what the other changes while it lives. Returns how long it has been the same (seconds)."""
        elapsed_s = min(now_s - self._last_s, MOST_AT_ONCE_S)
        self.silent_s = self.silent_s + elapsed_s if sign == self._sign else 0.0
        self._last_s, self._sign = now_s, sign
        return self.silent_s
