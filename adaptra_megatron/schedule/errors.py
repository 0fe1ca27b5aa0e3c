# SPDX-License-Identifier: Apache-2.0
"""What the schedule package raises for a schedule that cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaptra_megatron.schedule.actions import Action


class ScheduleError(ValueError):
    """A schedule that breaks a rule: the message names the rule, the place, the numbers and the remedy.

    `stage` and `action` say where, for programs; both are None when the schedule as a whole is wrong.
    """

    def __init__(self, message: str, *, stage: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.action = action


class MicroBatchCountError(ScheduleError, RuntimeError):
    """A last group of micro-batches that is too small. Scripts may catch the RuntimeError that Megatron has for it."""


def require_counts(**counts: int) -> None:
    """Raise ScheduleError, naming the count, for one that is no whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, got {count!r}")
