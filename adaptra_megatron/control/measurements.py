# SPDX-License-Identifier: Apache-2.0
"""What a rank measured in an iteration: as it travels, and condensed."""

from __future__ import annotations

import itertools
import statistics
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.control.memory import StageMemory
from adaptra_megatron.control.wire_format import Decoder
from adaptra_megatron.telemetry.records import ActionRecord
from adaptra_megatron.transport.messages import Direction, MessageKey, MessageTimes
from adaptra_megatron.transport.paths import Path, ProbeTimes

MESSAGE = np.dtype(
    [
        ("peer", "<i2"),
        ("host", "?"),
        ("micro_batch", "<u4"),
        ("chunk", "<u2"),
        ("gradient", "?"),
        ("nbytes", "<u8"),
        ("posted_s", "<f4"),
        ("done_s", "<f4"),
    ]
)
"""One message at one of its ends, moments since the start of the rank's iteration: single precision is microseconds.
The first five fields are what messages are ordered by."""
_PACKED_MESSAGE = struct.Struct("<h?IH?Qff")
"""The same for Python's own tuples: numpy takes three times as long to make an array of them."""


Messages = npt.NDArray[np.void]
"""Messages as an array of dtype MESSAGE, in order of `message_order`."""
MOST_NBYTES = 1 << 26
"""Longest measurement."""


@dataclass(frozen=True, eq=False)
class StageMeasurement:
    """One rank's iteration. It travels as it was recorded, for a training process has no time to condense it; what is
    made of records and messages is made where it is used, once. All moments of that are on the pipeline's common clock,
    in seconds."""

    pipeline: int
    """Which of the job's parallel pipelines (the first global rank of its pipeline group)."""
    stage: int
    iteration: int
    """Number in traces and keys of messages: evaluations are counted."""
    micro_batches: int
    records: Sequence[ActionRecord] = ()
    """Times of these and of messages are on the rank's own clock."""
    sends: Sequence[MessageTimes] = ()
    receives: Sequence[MessageTimes] = ()
    begun_s: float = 0.0
    """Beginning of an iteration without records, by the rank's own clock."""
    memory: StageMemory | None = None
    """None where memory is not measured, or not yet."""
    clock_offset_s: float = 0.0
    """What leads from this rank's clock to the common one."""
    probes: tuple[ProbeTimes, ...] = ()
    """Times of probes that this rank has sent, by the clocks of either end."""
    broken: tuple[BrokenPath, ...] = ()
    """Paths of this rank's outgoing links that were broken when the iteration ended."""
    disturbance: str | None = None
    """What may have disturbed all timings of this rank."""
    nbytes: Mapping[int, int] = field(default_factory=dict)
    """Of the messages of each micro-batch that has any, also where another replica's cell is at their other end."""

    @cached_property
    def span_s(self) -> tuple[float, float]:
        """Start of the first action and end of the last one."""
        start_s = min((record.start_s for record in self.records), default=self.begun_s)
        end_s = max((record.end_s for record in self.records), default=self.begun_s)
        return start_s + self.clock_offset_s, end_s + self.clock_offset_s

    @cached_property
    def durations_s(self) -> Mapping[tuple[str, int], npt.NDArray[np.float32]]:
        """By kind ("F", "B", "I", "W") and chunk: seconds of each action, without waiting."""
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _, _, kind, chunk, _, _, begun_s, ended_s in self.records:
            found[kind, chunk].append(ended_s - begun_s)
        return {key: np.array(values, dtype=np.float32) for key, values in found.items()}

    @cached_property
    def sizes(self) -> Mapping[tuple[str, int], npt.NDArray[np.float32]]:
        """By kind and chunk: bytes of the messages of each action's micro-batch, which are proportional to its tokens;
        one value where all are alike, and none where they are not known."""
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for _, _, kind, chunk, micro_batch, _, _, _ in self.records if self.nbytes else ():
            found[kind, chunk].append(self.nbytes.get(micro_batch, 0))
        return {
            key: np.array(values[:1] if len(set(values)) == 1 else values, dtype=np.float32)
            for key, values in found.items()
            if all(values)
        }

    @cached_property
    def sent(self) -> Messages:
        """`peer` is the target; a message is posted and done when it could leave."""
        return _messages(self.sends, self.span_s[0] - self.clock_offset_s)

    @cached_property
    def received(self) -> Messages:
        """`peer` is the source; posted when it was asked for, done when it had arrived."""
        return _messages(self.receives, self.span_s[0] - self.clock_offset_s)


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
    nbytes: Mapping[int, int] | None = None,
    idle: tuple[int, float] | None = None,
) -> StageMeasurement:
    """One rank's measurement; `clock_offset_s` is added to its local moments.

    `idle`: number and beginning of the iteration, for a cell that others relieve of all its work: it has no records.

    `ready_s`: when messages had been computed, where they are posted before that (on a GPU). `nbytes`: of the messages
    of each micro-batch that has any.
    """
    iteration, begun_s = (records[0].iteration, 0.0) if records else idle or (None, 0.0)
    assert iteration is not None, "a rank without records says of which iteration"
    sent, received = times
    if ready_s is not None:
        leave_s = [max(entry.posted_s, ready_s[entry.key]) for entry in sent]
        sent = [entry._replace(posted_s=at_s, done_s=at_s) for entry, at_s in zip(sent, leave_s, strict=True)]
    return StageMeasurement(
        pipeline=pipeline,
        stage=stage,
        iteration=iteration,
        micro_batches=micro_batches,
        records=records,
        sends=sent,
        receives=received,
        begun_s=begun_s,
        memory=memory,
        clock_offset_s=clock_offset_s,
        probes=tuple(probes),
        broken=tuple(broken),
        disturbance=disturbance,
        nbytes=nbytes or {},
    )


_DECODED: Decoder[StageMeasurement] = Decoder(StageMeasurement, MOST_NBYTES)


def measurement_of(packet: bytes) -> StageMeasurement:
    """A measurement as it travelled. Raises ValueError for anything else."""
    found = _DECODED(packet)
    try:
        _ = found.durations_s, found.sizes, found.sent, found.received
    except (struct.error, OverflowError) as cause:
        raise ValueError(f"a message of a measurement has a number out of range: {cause}") from cause
    return found


def mean_idle_share(measurements: Sequence[StageMeasurement]) -> float:
    """Fraction of its pipeline's iteration, 0..1, in which a rank did not compute: the mean over all ranks."""
    spans_s = _spans_s(measurements)
    return statistics.fmean(
        1.0 - float(sum(values.sum() for values in measurement.durations_s.values())) / spans_s[measurement.pipeline]
        for measurement in measurements
    )


def iteration_s(measurements: Sequence[StageMeasurement]) -> float:
    """Seconds from the first action to the last one, in the pipeline that took longest; never 0."""
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
    rows = sorted(
        (
            peer,
            path is Path.HOST,
            key.micro_batch,
            key.chunk,
            key.direction is Direction.GRADIENT,
            nbytes,
            posted_s - start_s,
            done_s - start_s,
        )
        for key, peer, posted_s, done_s, nbytes, path in times
    )
    return np.frombuffer(bytearray().join(itertools.starmap(_PACKED_MESSAGE.pack, rows)), MESSAGE)


def message_order(messages: Messages) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By what messages are ordered: their peer and path (2 * peer, and 1 for the host path), and then their key."""
    groups = messages["peer"].astype(np.int64) << 1 | messages["host"]
    chunk, gradient = messages["chunk"].astype(np.int64), messages["gradient"]
    return groups, messages["micro_batch"].astype(np.int64) << 17 | chunk << 1 | gradient
