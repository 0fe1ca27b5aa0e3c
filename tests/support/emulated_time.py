# SPDX-License-Identifier: Apache-2.0
"""A module's `time` whose waits are over at once: what a limit is for does not depend on how busy the machine is."""

from __future__ import annotations

LOOK_S = 1e-3


class EmulatedTime:
    """Monotonic clock that sleeps advance, and each look by LOOK_S, so that a wait without sleeps ends, too."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += LOOK_S
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
