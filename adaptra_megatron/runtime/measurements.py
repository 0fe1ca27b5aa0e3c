# SPDX-License-Identifier: Apache-2.0
"""What a rank measured in an iteration, small enough to travel."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.runtime.memory import StageMemory
from adaptra_megatron.telemetry.metrics import iteration_span_s
from adaptra_megatron.telemetry.records import ActionRecord
from adaptra_megatron.transport.messages import Direction, MessageKey, MessageTimes
from adaptra_megatron.transport.paths import Path, ProbeTimes

MESSAGE = np.dtype(
    [
        ("peer", "<i2"),
        ("host", "?"),
        ("gradient", "?"),
        ("chunk", "<u2"),
        ("micro_batch", "<u4"),
        ("nbytes", "<u8"),
        ("posted_s", "<f4"),
        ("done_s", "<f4"),
    ]
)
"""One message at one of its ends, moments since the start of the rank's iteration: single precision is microseconds."""


@dataclass(frozen=True)
class _ArrayOf:
    """How an array travels: see `tagged_json`."""

    dtype: npt.DTypeLike
    travels_as: ClassVar[type] = bytes

    def read(self, value: bytes) -> npt.NDArray[Any]:
        """Raises ValueError for bytes that are no such array."""
        return np.frombuffer(bytearray(value), self.dtype)


Messages = Annotated[npt.NDArray[np.void], _ArrayOf(MESSAGE)]
"""Of dtype MESSAGE, in order of `message_order`."""

_CODE_BITS = 45
"""One for the direction, 16 for the chunk, and what micro-batches need at most."""


@dataclass(frozen=True, eq=False)
class StageMeasurement:
    """One rank's iteration. All moments are on its pipeline's common clock, in seconds."""

    pipeline: int
    """Which of the job's parallel pipelines (the first global rank of its pipeline group)."""
    stage: int
    iteration: int
    """As in traces and keys of messages: evaluations are counted."""
    micro_batches: int
    span_s: tuple[float, float]
    """Start of the first action and end of the last one."""
    durations_s: Mapping[tuple[str, int], Annotated[npt.NDArray[np.float32], _ArrayOf(np.float32)]]
    """By kind ("F", "B", "I", "W") and chunk: seconds of each action, without waiting."""
    sent: Messages
    """`peer` is the target; a message is posted and done when it could leave."""
    received: Messages
    """`peer` is the source; posted when it was asked for, done when it had arrived."""
    memory: StageMemory | None = None
    """None where memory is not measured, or not yet."""
    clock_offset_s: float = 0.0
    """What leads from this rank's clock to the common one."""
    probes: tuple[ProbeTimes, ...] = ()
    """Of what this rank has sent; moments by the clocks of either end."""
    broken: tuple[BrokenPath, ...] = ()
    """Of what this rank sends, when the iteration ended."""
    disturbance: str | None = None
    """What may have disturbed all timings of this rank."""


class BrokenPath(NamedTuple):
    """A path of a link that its sender has given up."""

    peer: int
    path: Path
    cause: str


def stage_measurement(
    pipeline: int,
    stage: int,
    micro_batches: int,
    records: Sequence[ActionRecord],
    times: tuple[Sequence[MessageTimes], Sequence[MessageTimes]],
    clock_offset_s: float,
    ready_s: Mapping[MessageKey, float] | None = None,
    memory: StageMemory | None = None,
    *,
    probes: Sequence[ProbeTimes] = (),
    broken: Sequence[BrokenPath] = (),
    disturbance: str | None = None,
) -> StageMeasurement:
    """Condense one rank's records (at least one); `clock_offset_s` is added to its local moments.

    `ready_s`: when messages had been computed, where they are posted before that (on a GPU).
    """
    durations_s: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        durations_s[record.kind, record.chunk].append(record.compute_s)
    start_s, end_s = iteration_span_s(records)
    sent, received = times
    if ready_s is not None:
        leave_s = [max(entry.posted_s, ready_s[entry.key]) for entry in sent]
        sent = [entry._replace(posted_s=at_s, done_s=at_s) for entry, at_s in zip(sent, leave_s, strict=True)]
    return StageMeasurement(
        pipeline=pipeline,
        stage=stage,
        iteration=records[0].iteration,
        micro_batches=micro_batches,
        span_s=(start_s + clock_offset_s, end_s + clock_offset_s),
        durations_s={key: np.array(values, dtype=np.float32) for key, values in durations_s.items()},
        sent=_messages(sent, start_s),
        received=_messages(received, start_s),
        memory=memory,
        clock_offset_s=clock_offset_s,
        probes=tuple(probes),
        broken=tuple(broken),
        disturbance=disturbance,
    )


def mean_idle_share(measurements: Sequence[StageMeasurement]) -> float:
    """Fraction of its pipeline's iteration, 0..1, in which a rank did not compute: the mean over all ranks."""
    spans_s = _spans_s(measurements)
    return statistics.fmean(
        1.0 - float(sum(values.sum() for values in measurement.durations_s.values())) / spans_s[measurement.pipeline]
        for measurement in measurements
    )


def iteration_s(measurements: Sequence[StageMeasurement]) -> float:
    """Of the pipeline that took longest: from its first action to its last one, in seconds; never 0."""
    return max(_spans_s(measurements).values())


def _spans_s(measurements: Sequence[StageMeasurement]) -> dict[int, float]:
    """By pipeline, for each has a clock of its own."""
    of_pipeline: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for measurement in measurements:
        of_pipeline[measurement.pipeline].append(measurement.span_s)
    return {
        pipeline: max(1e-6, max(end_s for _, end_s in spans_s) - min(start_s for start_s, _ in spans_s))
        for pipeline, spans_s in of_pipeline.items()
    }


def _messages(times: Sequence[MessageTimes], start_s: float) -> Messages:
    rows = [
        (
            entry.peer,
            entry.path is Path.HOST,
            entry.key.direction is Direction.GRADIENT,
            entry.key.chunk,
            entry.key.micro_batch,
            entry.nbytes,
            entry.posted_s - start_s,
            entry.done_s - start_s,
        )
        for entry in times
    ]
    messages = np.array(rows, dtype=MESSAGE)
    groups, codes = message_order(messages)
    return messages[np.argsort(groups << _CODE_BITS | codes)]


def message_order(messages: Messages) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By what messages are ordered: their peer and path (2 * peer, and 1 for the host path), and then their key."""
    groups = messages["peer"].astype(np.int64) << 1 | messages["host"]
    chunk, gradient = messages["chunk"].astype(np.int64), messages["gradient"]
    return groups, messages["micro_batch"].astype(np.int64) << 17 | chunk << 1 | gradient
