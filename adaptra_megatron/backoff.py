# SPDX-License-Identifier: Apache-2.0
"""Pauses between attempts that fail."""

from __future__ import annotations


class Backoff:
    """Each pause is twice as long as the one before, up to a limit. Pure bookkeeping: who asks does the waiting."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s, self._next_s = first_s, longest_s, first_s

    def next_s(self) -> float:
        """Return the pause before the next attempt (seconds)."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._next_s = self._first_s
