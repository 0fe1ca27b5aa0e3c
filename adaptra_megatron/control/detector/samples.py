# SPDX-License-Identifier: Apache-2.0
"""Hold the measurements of an iteration. All moments are seconds on one clock; all of one iteration is observed at
once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
