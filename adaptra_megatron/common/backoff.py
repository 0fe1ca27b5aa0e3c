# SPDX-License-Identifier: Apache-2.0
"""Pauses between attempts that fail."""

from __future__ import annotations


class Backoff:
    """Each pause is `factor` times as long as the one before, up to a limit. Pure: who asks does the waiting."""

    def __init__(self, first_s: float, longest_s: float, factor: float = 2.0) -> None:
        self._first_s, self._longest_s, self._factor = first_s, longest_s, factor
        self.pause_s = first_s
        """The next pause."""
        self.failures = 0
        """Pauses since the last attempt that succeeded."""

    def next_s(self) -> float:
        """Return the pause before the next attempt (seconds), and make the one after it longer."""
        pause_s = self.pause_s
        self.failures += 1
        self.pause_s = min(self._factor * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self.pause_s, self.failures = self._first_s, 0
