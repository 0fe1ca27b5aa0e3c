# SPDX-License-Identifier: Apache-2.0
"""Detect events before an iteration that make its timings unusable."""

from __future__ import annotations

from collections import deque
from statistics import median

_REMEMBERED = 8
_ENOUGH = 3
LONG_PAUSE_S = 1.0
LONG_PAUSE_FACTOR = 5.0
"""Multiple of the usual pause between two iterations."""


class DisturbanceWatch:
    """Detects disturbances of one rank's iterations. Pure: times are arguments (seconds of the monotonic clock).

    An event that precedes every second iteration or more is part of normal training, not a disturbance; otherwise no
    iteration would be left to measure.
    """

    def __init__(self) -> None:
        self._evaluated = False
        self._ended_s: float | None = None
        self._pauses_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._disturbed: deque[bool] = deque(maxlen=_REMEMBERED)

    def evaluated(self) -> None:
        """Record that an evaluation has run."""
        self._evaluated = True

    def began(self, now_s: float) -> str | None:
        """Record the start of a training iteration; return its disturbance in words, or None."""
        what = "an evaluation just before" if self._evaluated else self._long_pause(now_s)
        self._evaluated = False
        self._disturbed.append(what is not None)
        return what if 2 * sum(self._disturbed) <= max(_ENOUGH, len(self._disturbed)) else None

    def ended(self, now_s: float) -> None:
        """Record the end of the training iteration."""
        self._ended_s = now_s

    def _long_pause(self, now_s: float) -> str | None:
        if self._ended_s is None:
            return None
        pause_s = now_s - self._ended_s
        usual_s = median(self._pauses_s) if len(self._pauses_s) >= _ENOUGH else None
        self._pauses_s.append(pause_s)
        if usual_s is None or pause_s < max(LONG_PAUSE_S, LONG_PAUSE_FACTOR * usual_s):
            return None
        return f"a pause of {pause_s:.1f} s just before, as for a checkpoint"
