# SPDX-License-Identifier: Apache-2.0
"""Define what the detector takes in, what it finds, and how much evidence it wants."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.reasons import Reason, reason_text


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
        for each in fields(self):
            if each.type == "int":
                value = getattr(self, each.name)
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(f"{each.name} must be a whole number, got {value!r}")
                _check(each.name, value, at_least=0 if each.name == "ignored_iterations" else 1)
        if self.recurrent_iterations > self.recurrence_window:
            raise ValueError(
                f"recurrent_iterations ({self.recurrent_iterations}) must not exceed "
                f"recurrence_window ({self.recurrence_window})"
            )
        if not 0.0 < self.planning_quantile < 1.0:
            raise ValueError(f"planning_quantile must be between 0 and 1, got {self.planning_quantile!r}")
        _check("size_tolerance", self.size_tolerance, at_least=0.0)


Array = npt.NDArray[np.float64]


class LinkId(NamedTuple):
    """One path of one directed link of one pipeline."""

    pipeline: int
    """Which of the job's parallel pipelines (the first global rank of its pipeline group)."""
    source: int
    """Pipeline rank."""
    target: int
    path: str
    """"device" or "host"."""

    def __str__(self) -> str:
        return f"link {self.source}->{self.target} of pipeline {self.pipeline}, {self.path} path"


class StageId(NamedTuple):
    """One stage of one pipeline."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} of pipeline {self.pipeline}"


class MessageSample(NamedTuple):
    """One message on one path: a tensor of the training, or a probe."""

    nbytes: int
    sent_s: float
    arrived_s: float | None
    """None: it did not arrive by this path."""
    posted_s: float | None = None
    """When the receive was posted, where a message cannot arrive before that; None where an arrival is seen anyhow.

    A message that was sent before its receive was posted says nothing of the link.
    """


class MessageColumns(NamedTuple):
    """Messages as columns of equal length: what there are many of. NaN stands for None."""

    nbytes: Array
    sent_s: Array
    arrived_s: Array
    posted_s: Array

    @staticmethod
    def of(messages: Sequence[MessageSample]) -> MessageColumns:
        """The same as columns."""
        rows = [tuple(math.nan if value is None else value for value in message) for message in messages]
        return MessageColumns(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)

    def and_also(self, others: MessageColumns) -> MessageColumns:
        """All messages of both."""
        return MessageColumns(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))

    @property
    def arrived(self) -> npt.NDArray[np.bool_]:
        """Return which of them did."""
        return ~np.isnan(self.arrived_s)

    @property
    def awaited(self) -> npt.NDArray[np.bool_]:
        """Which of them tell how long the way was: no receive was posted later than they were sent."""
        return ~(self.posted_s > self.sent_s)


NO_MESSAGES = MessageColumns.of(())


@dataclass(frozen=True, eq=False)
class LinkSample:
    """Messages that one path of a link carried in an iteration; without messages it says nothing but whether it is
    broken."""

    messages: MessageColumns = NO_MESSAGES
    broken: str | None = None
    """Why the transport had given the path up when the iteration ended, in its words; None while it had not."""

    @staticmethod
    def of(messages: Sequence[MessageSample], broken: str | None = None) -> LinkSample:
        """The same of messages one by one."""
        return LinkSample(MessageColumns.of(messages), broken)


@dataclass(frozen=True)
class StageSample:
    """Actions that one stage computed in an iteration."""

    durations_s: Mapping[tuple[str, int], Sequence[float] | npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """By (kind, chunk), kinds "F", "B", "I" and "W": seconds without waiting, one value per action, or their median."""
    lost: str | None = None
    """Why the stage is known to be gone; None while it is not."""
    sizes: Mapping[tuple[str, int], Sequence[float] | npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """By (kind, chunk), where it is known: how much each action had to do, in the same order, or one value where all
    had as much. In any unit that is the same for all pipelines and iterations."""
    work: Sequence[str] = ()
    """By chunk, where it is known: what it computes. Chunks of one text take about as long."""


@dataclass(frozen=True)
class IterationSample:
    """One training iteration. What is missing from it is not judged, and stays what it was."""

    iteration: int
    links: Mapping[LinkId, LinkSample] = field(default_factory=dict)
    stages: Mapping[StageId, StageSample] = field(default_factory=dict)
    disturbance: str | None = None
    """What is known to have disturbed all timings (a checkpoint save, an evaluation just before): then only broken
    paths and lost stages count."""


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
    """Latency quantile for planning, without the time of the bytes; `transfer_s` where the two cannot be separated."""
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
