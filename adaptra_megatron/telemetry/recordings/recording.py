# SPDX-License-Identifier: Apache-2.0
"""A recording as `adaptra analyze` takes it, whatever it was read from."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from adaptra_megatron.schedule.replay.operations import RecordedStep


class RecordingError(ValueError):
    """A recording that cannot be read: the message names the file, what was expected and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps of one job, by their numbers."""

    name: str
    source: str
    """What it was read from, in words."""
    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise RecordingError(f"{self.name} has no training step that is complete")


class AllSteps:
    """Every number."""

    def __contains__(self, number: object) -> bool:
        return True


Wanted = Container[int]
"""Numbers of the steps to read."""
ALL_STEPS = AllSteps()
