# SPDX-License-Identifier: Apache-2.0
"""Define the detector's input, its findings, and its thresholds (LINK_CHANGES, STAGE_CHANGES)."""

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
    """Thresholds for a change of a level (seconds per message or per action). A change must exceed all of them."""

    relative_shift: float
    """Smallest shift that counts, as a share of the level it is compared with."""
    min_shift_s: float
    action_share: float = 0.1
    """Smallest shift that counts, as a share of the job's median action: smaller ones hardly matter to a schedule."""
    sigmas: float = 4.0
    """Smallest shift that counts, in standard deviations of an iteration's median."""
    single_iteration: bool
    """Whether overwhelming evidence of one iteration is enough."""
    replica_factor: float
    """A series is slow from the start if it exceeds the same position of the other pipelines by this factor."""
    peer_factor: float
    """The same for other positions of its pipeline, which differ more; used if there are too few pipelines."""

    def __post_init__(self) -> None:
        for name in ("relative_shift", "min_shift_s", "action_share", "sigmas"):
            _check(name, getattr(self, name), at_least=0.0)
        for name in ("replica_factor", "peer_factor"):
            _check(name, getattr(self, name), at_least=1.0)

    def material_s(self, level_s: float, action_s: float) -> float:
        """Return the smallest shift of `level_s` that counts. `action_s`: median seconds of the job's actions."""
        return max(self.min_shift_s, self.relative_shift * abs(level_s), self.action_share * action_s)


LINK_CHANGES = ChangeSettings(
    relative_shift=0.25, min_shift_s=0.5e-3, single_iteration=True, replica_factor=2.0, peer_factor=4.0
)
"""A message takes 25% and 0.5 ms longer, a tenth of an action and 4 standard deviations: in nearly all messages of an
iteration, or in iterations in a row (DetectorSettings). From the start: by these factors longer than elsewhere."""
STAGE_CHANGES = ChangeSettings(
    relative_shift=0.1, min_shift_s=0.1e-3, single_iteration=False, replica_factor=1.3, peer_factor=2.0
)
"""A stage is never judged by one iteration: a slow one may come from a checkpoint being written."""


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Settings of a Detector. Only iterations with evidence are counted."""

    link: ChangeSettings = LINK_CHANGES
    stage: ChangeSettings = STAGE_CHANGES
    ignored_iterations: int = 1
    """First iterations that are left out: they pay for allocations and lazy set-up."""
    settling_iterations: int = 3
    """Iterations that the first baseline is taken from, before anything is judged."""
    baseline_iterations: int = 32
    """Maximum number of iterations of one level that a new iteration is compared with."""
    estimate_iterations: int = 8
    """Maximum number of iterations of one level that estimates are made from."""
    confirm_iterations: int = 2
    """Consecutive iterations that must agree on a change that is not overwhelming."""
    recurrent_iterations: int = 4
    """A level has also risen if this many of the latest `recurrence_window` iterations were slower, consecutive or
    not."""
    recurrence_window: int = 8
    flap_iterations: int = 50
    """A relapse within this many iterations of a recovery doubles the hold time of the next recovery."""
    longest_hold_iterations: int = 64
    """Longest hold time."""
    min_messages: int = 3
    """Minimum number of messages of an iteration that a link is judged by."""
    overwhelming_messages: int = 6
    """Minimum number of messages that can be overwhelming evidence; messages that arrived together with a later one do
    not count."""
    planning_quantile: float = 0.75
    """Quantile of transfer times to plan for: a delay that is too high costs memory, one that is too low costs time."""
    size_tolerance: float = 0.25
    """On a link of unknown bandwidth, messages are comparable only if they differ from the usual size by at most this
    share."""

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
    """First global rank of the pipeline's group."""
    source: int
    """Rank within the pipeline."""
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
    """None if it did not arrive by this path."""
    posted_s: float | None = None
    """When the receive was posted, if a message cannot arrive before; None if its arrival is seen in any case.

    A message that was sent before its receive was posted yields no latency.
    """


class MessageColumns(NamedTuple):
    """Messages as columns of equal length; NaN stands for None."""

    nbytes: Array
    sent_s: Array
    arrived_s: Array
    posted_s: Array

    @staticmethod
    def of(messages: Sequence[MessageSample]) -> MessageColumns:
        """Return messages as columns."""
        rows = [tuple(math.nan if value is None else value for value in message) for message in messages]
        return MessageColumns(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)

    def and_also(self, others: MessageColumns) -> MessageColumns:
        """Return the messages of both."""
        return MessageColumns(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))

    @property
    def arrived(self) -> npt.NDArray[np.bool_]:
        """Which messages arrived."""
        return ~np.isnan(self.arrived_s)

    @property
    def awaited(self) -> npt.NDArray[np.bool_]:
        """Which messages yield a latency: the receive was not posted later than the message was sent."""
        return ~(self.posted_s > self.sent_s)


NO_MESSAGES = MessageColumns.of(())


@dataclass(frozen=True, eq=False)
class LinkSample:
    """Messages that one path of a link carried in an iteration, and whether the path is broken."""

    messages: MessageColumns = NO_MESSAGES
    broken: str | None = None
    """Why the transport gave the path up before the iteration ended; None if it did not."""

    @staticmethod
    def of(messages: Sequence[MessageSample], broken: str | None = None) -> LinkSample:
        """Return a sample of messages given one by one."""
        return LinkSample(MessageColumns.of(messages), broken)


@dataclass(frozen=True)
class StageSample:
    """Actions that one stage computed in an iteration."""

    durations_s: Mapping[tuple[str, int], Sequence[float] | npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """By (kind, chunk), kinds "F", "B", "I" and "W": seconds without waiting, one value per action, or their median."""
    lost: str | None = None
    """Why the stage is known to have failed; None if it has not."""
    sizes: Mapping[tuple[str, int], Sequence[float] | npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """By (kind, chunk), if known: size of each action, in the order of the durations, or one value for all. Any unit
    that all pipelines and iterations share."""
    work: Sequence[str] = ()
    """By chunk, if known: text that describes its layers. Chunks with equal text take about equally long."""


@dataclass(frozen=True)
class IterationSample:
    """One training iteration. A link or stage without a sample is not judged and keeps its state."""

    iteration: int
    links: Mapping[LinkId, LinkSample] = field(default_factory=dict)
    stages: Mapping[StageId, StageSample] = field(default_factory=dict)
    disturbance: str | None = None
    """What disturbed all timings, if anything (a checkpoint being saved, an evaluation before): then only broken paths
    and lost stages count."""


class State(str, enum.Enum):
    """State of a link's path, or of a stage."""

    HEALTHY = "healthy"
    SLOW = "slow"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A change of a state, or of the level in one state, at the iteration that confirmed it."""

    iteration: int
    subject: LinkId | StageId
    before: State
    state: State
    since_iteration: int
    """The first iteration that showed the change."""
    state_since_iteration: int
    """First iteration of the present state; earlier than `since_iteration` if only the level has changed."""
    level_s: float | None
    """Seconds per message of the usual size, or per action. Of a stage's actions: the one that is slowest compared
    with its healthy level, or if none is slow, the one that changed most. None if dead."""
    baseline_s: float | None
    """The same at the healthy level; None if unknown."""
    why: Reason

    @property
    def reason(self) -> str:
        """Return why, in words."""
        return reason_text(self.why)

    def describe(self) -> Reason:
        """Return the finding in words, then why."""
        still = "still " if self.state is self.before else ""
        head = f"{self.subject}: {still}{self.state.value} since iteration "
        return head, self.state_since_iteration, (", ", self.why)

    def __str__(self) -> str:
        return reason_text(self.describe())

    def to_json(self) -> dict[str, Any]:
        """Return the finding for the event log, as plain numbers and text."""
        document = asdict(self) | {"reason": self.reason}
        document["subject"] = {"kind": "link" if isinstance(self.subject, LinkId) else "stage"}
        document["subject"].update(self.subject._asdict())
        return {**document, "before": self.before.value, "state": self.state.value}


@dataclass(frozen=True, kw_only=True)
class LinkEstimate:
    """Present estimate of one path of a link, from the latest iterations of its level."""

    latency_s: float
    """Latency to plan for (a quantile), without the time of the bytes; equal to `transfer_s` if these cannot be
    separated."""
    bandwidth_bytes_per_s: float | None
    """None if unknown: messages of one size that never wait for each other yield none, and need none."""
    transfer_s: float
    """Seconds to plan for (a quantile) of a message of `nbytes` on the idle link: latency plus the time of its bytes.
    """
    nbytes: int
    """Bytes of a usual message."""
    state: State
    since_iteration: int
    measured_iteration: int
    """The latest iteration that agreed with this level."""
    reason: Reason
    clock_correction_s: float
    """Seconds subtracted from the latest transfer times, because those of the other direction were negative."""

    def occupancy_s(self, nbytes: int) -> float:
        """Return the seconds that a message of `nbytes` keeps the link busy; 0 if the bandwidth is unknown."""
        return 0.0 if self.bandwidth_bytes_per_s is None else nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """Present estimate of one stage."""

    durations_s: Mapping[tuple[str, int], float]
    """By (kind, chunk): median seconds of an action of the usual size, in the latest iterations of its level."""
    state: State
    since_iteration: int
    reason: Reason


@dataclass(frozen=True)
class Estimates:
    """Estimates of all links and stages that were ever measured."""

    links: Mapping[LinkId, LinkEstimate]
    stages: Mapping[StageId, StageEstimate]
