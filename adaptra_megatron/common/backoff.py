# SPDX-License-Identifier: Apache-2.0
"""Compute pauses between failing attempts."""

from __future__ import annotations


class Backoff:
    """Pauses that grow by `factor` up to a limit. Pure: the caller does the waiting."""

    def __init__(self, first_s: float, longest_s: float, factor: float = 2.0) -> None:
        self._first_s, self._longest_s, self._factor = first_s, longest_s, factor
        self.pause_s = first_s
        """The next pause."""
        self.failures = 0
        """Number of pauses since the last successful attempt."""

    def next_s(self) -> float:
        """Return the pause before the next attempt, in seconds, and lengthen the one after it."""
        pause_s = self.pause_s
        self.failures += 1
        self.pause_s = min(self._factor * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Start again with the first pause, since an attempt has succeeded."""
        self.pause_s, self.failures = self._first_s, 0
