# SPDX-License-Identifier: Apache-2.0
"""Flap damping: each relapse soon after a recovery lengthens the time until the next one counts."""

from __future__ import annotations

from adaptra_megatron.detector.settings import DetectorSettings


class FlapDamper:
    """Flap damping of a link or stage: each relapse soon after a recovery lengthens the next hold time."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._recovered: int | None = None
        self.flaps = 0
        """Relapses, each soon after the recovery before."""

    def fell(self, iteration: int) -> None:
        """It stopped being healthy."""
        soon = self._recovered is not None and iteration - self._recovered <= self._settings.flap_iterations
        self.flaps = self.flaps + 1 if soon else 0

    def recovered(self, iteration: int) -> None:
        """It is healthy again."""
        self._recovered = iteration

    @property
    def hold_iterations(self) -> int:
        """How many iterations in a row must show a recovery for it to be believed."""
        doublings = min(self.flaps, self._settings.longest_hold_iterations.bit_length())
        return max(
            self._settings.confirm_iterations,
            min(self._settings.longest_hold_iterations, self._settings.confirm_iterations << doublings),
        )
