# SPDX-License-Identifier: Apache-2.0
"""Define the detector's findings: states with their reasons, and estimates to plan with."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adaptra_megatron.common.reasons import Reason, reason_text
from adaptra_megatron.control.detector.samples import LinkId, StageId


class State(str, enum.Enum):
    """State of a link's path, or of a stage."""

    HEALTHY = "healthy"
    SLOW = "slow"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A change of a state, or of the level within one, at the iteration that gave the last evidence for it."""

    iteration: int
    subject: LinkId | StageId
    before: State
    state: State
    since_iteration: int
    """The first iteration that showed the change."""
    state_since_iteration: int
    """The first iteration of the present state: an earlier one where only the level has changed."""
    level_s: float | None
    """Seconds per message of the usual size, or per action: of the kind that is slowest beside its health where any is
    slow, else of the kind that changed most. None of the dead."""
    baseline_s: float | None
    """The same in health; None where that is not known."""
    why: Reason

    @property
    def reason(self) -> str:
        """Return why, in words."""
        return reason_text(self.why)

    def describe(self) -> Reason:
        """Return what was found, with why behind it."""
        still = "still " if self.state is self.before else ""
        head = f"{self.subject}: {still}{self.state.value} since iteration "
        return head, self.state_since_iteration, (", ", self.why)

    def __str__(self) -> str:
        return reason_text(self.describe())

    def to_json(self) -> dict[str, Any]:
        """A line of the event log: plain numbers and text."""
        document = asdict(self) | {"reason": self.reason}
        document["subject"] = {"kind": "link" if isinstance(self.subject, LinkId) else "stage"}
        document["subject"].update(self.subject._asdict())
        return {**document, "before": self.before.value, "state": self.state.value}


@dataclass(frozen=True, kw_only=True)
class LinkEstimate:
    """One path of a link as it is now, from the latest iterations of its present level."""

    latency_s: float
    """Planning quantile, without the bytes' own time; equal to `transfer_s` where the two cannot be told apart."""
    bandwidth_bytes_per_s: float | None
    """None where messages of one size never wait for each other: then nothing tells it, and it does not matter."""
    transfer_s: float
    """Planning quantile, of a message of `nbytes` on the idle link: latency plus the time its bytes take."""
    nbytes: int
    """The usual message."""
    state: State
    since_iteration: int
    measured_iteration: int
    """The latest iteration that agreed with it."""
    reason: Reason
    clock_correction_s: float
    """Taken off the latest measured times, because the other direction's would have been negative without."""

    def occupancy_s(self, nbytes: int) -> float:
        """Seconds that a message of `nbytes` keeps the link busy; 0 where the bandwidth is not known."""
        return 0.0 if self.bandwidth_bytes_per_s is None else nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """One stage as it is now."""

    durations_s: Mapping[tuple[str, int], float]
    """By (kind, chunk): median seconds of the latest iterations of the present level, for the usual size."""
    state: State
    since_iteration: int
    reason: Reason


@dataclass(frozen=True)
class Estimates:
    """Estimates of all links and stages that were ever measured."""

    links: Mapping[LinkId, LinkEstimate]
    stages: Mapping[StageId, StageEstimate]
