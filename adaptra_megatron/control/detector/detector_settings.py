# SPDX-License-Identifier: Apache-2.0
"""Set how much evidence the detector wants."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


def _check(name: str, value: float, *, at_least: float) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ChangeSettings:
    """Thresholds beyond which a level (seconds per message, or per action) counts as changed. A change must pass every
    threshold."""

    relative_shift: float
    """Smallest shift that counts, as a share of the level it is compared with."""
    min_shift_s: float
    action_share: float = 0.1
    """Smallest shift that counts, as a share of the job's median action: less hardly matters to a schedule."""
    sigmas: float = 4.0
    """Smallest shift that counts, in standard deviations of an iteration's median."""
    single_iteration: bool
    """Lets overwhelming evidence of one iteration be enough."""
    replica_factor: float
    """Slower than the same position of the other pipelines by more than this, from the start on, is slow."""
    peer_factor: float
    """The same for the other positions, which differ more, where there are too few pipelines."""

    def __post_init__(self) -> None:
        for name in ("relative_shift", "min_shift_s", "action_share", "sigmas"):
            _check(name, getattr(self, name), at_least=0.0)
        for name in ("replica_factor", "peer_factor"):
            _check(name, getattr(self, name), at_least=1.0)

    def material_s(self, level_s: float, action_s: float) -> float:
        """The least shift of `level_s` that counts, in a job whose median action takes `action_s`."""
        return max(self.min_shift_s, self.relative_shift * abs(level_s), self.action_share * action_s)


LINK_CHANGES = ChangeSettings(
    relative_shift=0.25, min_shift_s=0.5e-3, single_iteration=True, replica_factor=2.0, peer_factor=4.0
)
STAGE_CHANGES = ChangeSettings(
    relative_shift=0.1, min_shift_s=0.1e-3, single_iteration=False, replica_factor=1.3, peer_factor=2.0
)
"""A whole iteration of slow compute may be a checkpoint being written: a stage is never judged by one alone."""


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Settings of a Detector. Iterations are counted where they had evidence."""

    link: ChangeSettings = LINK_CHANGES
    stage: ChangeSettings = STAGE_CHANGES
    ignored_iterations: int = 1
    """The first ones pay for allocations and lazy set-up."""
    settling_iterations: int = 3
    """From which the first baseline is taken, before anything is judged."""
    baseline_iterations: int = 32
    """The latest of one level; they are what a new iteration is compared with."""
    estimate_iterations: int = 8
    """The latest of these; they are what estimates are made from."""
    confirm_iterations: int = 2
    """In a row that must agree on a change, where one is not overwhelming."""
    recurrent_iterations: int = 4
    """A level that rises in so many of `recurrence_window`, though never in a row, has risen as well."""
    recurrence_window: int = 8
    flap_iterations: int = 50
    """A relapse within so many iterations of a recovery doubles the time until the next recovery counts."""
    longest_hold_iterations: int = 64
    """And no longer than this."""
    min_messages: int = 3
    """Fewer in an iteration say nothing of a link."""
    overwhelming_messages: int = 6
    """Fewer, those left out that arrived together with a later one, are never overwhelming."""
    planning_quantile: float = 0.75
    """Quantile of transfer times to plan for: over-estimating a delay costs memory, under-estimating costs time."""
    size_tolerance: float = 0.25
    """Messages that differ from the link's usual size by more, on a link of unknown bandwidth, are not comparable."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                value = getattr(self, field.name)
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(f"{field.name} must be a whole number, got {value!r}")
                _check(field.name, value, at_least=0 if field.name == "ignored_iterations" else 1)
        if self.recurrent_iterations > self.recurrence_window:
            raise ValueError(
                f"recurrent_iterations ({self.recurrent_iterations}) must not exceed "
                f"recurrence_window ({self.recurrence_window})"
            )
        if not 0.0 < self.planning_quantile < 1.0:
            raise ValueError(f"planning_quantile must be between 0 and 1, got {self.planning_quantile!r}")
        _check("size_tolerance", self.size_tolerance, at_least=0.0)
