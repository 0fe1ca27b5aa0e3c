# SPDX-License-Identifier: Apache-2.0
"""What ranks measured in an iteration, small enough to travel, and put together for the detector."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.detector.samples import (
    IterationSample,
    LinkId,
    LinkSample,
    MessageColumns,
    StageId,
    StageSample,
)
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

Messages = npt.NDArray[np.void]
"""Of dtype MESSAGE."""


@dataclass(frozen=True, eq=False)
class StageMeasurement:
    """One rank's iteration. All moments are on the job's common clock, in seconds."""

    pipeline: int
    """Which of the job's parallel pipelines (the first global rank of its pipeline group)."""
    stage: int
    iteration: int
    """As in traces and keys of messages: evaluations are counted."""
    micro_batches: int
    span_s: tuple[float, float]
    """Start of the first action and end of the last one."""
    durations_s: Mapping[tuple[str, int], npt.NDArray[np.float32]]
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
    """Fraction of the iteration, 0..1, in which a rank did not compute: the mean over all ranks."""
    start_s = min(measurement.span_s[0] for measurement in measurements)
    end_s = max(measurement.span_s[1] for measurement in measurements)
    busy_s = statistics.fmean(
        float(sum(values.sum() for values in measurement.durations_s.values())) for measurement in measurements
    )
    return 1.0 - busy_s / (end_s - start_s)


def iteration_s(measurements: Sequence[StageMeasurement]) -> float:
    """From the first action of any rank to the last one, in seconds; never 0."""
    start_s = min(measurement.span_s[0] for measurement in measurements)
    return max(1e-6, max(measurement.span_s[1] for measurement in measurements) - start_s)


def iteration_sample(measurements: Sequence[StageMeasurement]) -> IterationSample:
    """One iteration of all ranks as the detector takes it in.

    A message that was sent on a path and did not arrive by it counts as lost there, if its receiver was heard.
    """
    received: dict[LinkId, _Arrivals] = {}
    for measurement in measurements:
        for source, path, messages in _by_peer_and_path(measurement.received):
            link = LinkId(measurement.pipeline, source, measurement.stage, path.value)
            received[link] = _Arrivals(messages, measurement.span_s[0])
    heard = {(measurement.pipeline, measurement.stage) for measurement in measurements}
    links = {}
    for measurement in measurements:
        for target, path, messages in _by_peer_and_path(measurement.sent):
            if (measurement.pipeline, target) in heard:
                link = LinkId(measurement.pipeline, measurement.stage, target, path.value)
                arrivals = received.get(link) or _Arrivals(messages[:0], 0.0)
                links[link] = LinkSample(arrivals.of(messages, measurement.span_s[0], path))
    _add_probes(links, measurements)
    stages = {
        StageId(measurement.pipeline, measurement.stage): StageSample(
            {key: values.astype(np.float64) for key, values in measurement.durations_s.items()}
        )
        for measurement in measurements
    }
    disturbances = (measurement.disturbance for measurement in measurements)
    disturbance = next((what for what in disturbances if what is not None), None)
    return IterationSample(measurements[0].iteration, links, stages, disturbance)


def _add_probes(links: dict[LinkId, LinkSample], measurements: Sequence[StageMeasurement]) -> None:
    """What was told of paths by other means than their messages."""
    offset_s = {(measurement.pipeline, measurement.stage): measurement.clock_offset_s for measurement in measurements}
    for measurement in measurements:
        pipeline, stage, own_offset_s = measurement.pipeline, measurement.stage, measurement.clock_offset_s
        for probe in measurement.probes:
            if (pipeline, probe.peer) in offset_s:
                link = LinkId(pipeline, stage, probe.peer, probe.path.value)
                arrived_s = probe.arrived_s + offset_s[pipeline, probe.peer]
                columns = probe.nbytes, probe.sent_s + own_offset_s, arrived_s, np.nan
                before = links.get(link, LinkSample())
                message = MessageColumns(*(np.array([value], dtype=np.float64) for value in columns))
                links[link] = replace(before, messages=before.messages.and_also(message))
        for peer, path, cause in measurement.broken:
            link = LinkId(pipeline, stage, peer, path.value)
            links[link] = replace(links.get(link, LinkSample()), broken=cause)


class _Arrivals:
    """What came over one link by one path, in order of key."""

    def __init__(self, messages: Messages, start_s: float) -> None:
        codes = _codes(messages)
        order = np.argsort(codes)
        self._codes = codes[order]
        self._posted_s = messages["posted_s"][order] + np.float64(start_s)
        self._arrived_s = messages["done_s"][order] + np.float64(start_s)

    def of(self, sent: Messages, start_s: float, path: Path) -> MessageColumns:
        """The messages that were sent, each with its arrival."""
        codes = _codes(sent)
        arrived_s = np.full(len(codes), np.nan)
        posted_s = arrived_s.copy()
        if len(self._codes):
            places = np.searchsorted(self._codes, codes)
            places[places == len(self._codes)] = 0
            arrived_s = np.where(self._codes[places] == codes, self._arrived_s[places], np.nan)
            if path is Path.DEVICE:  # what comes by the host path is seen whether or not anybody has asked for it
                posted_s = self._posted_s[places]
        sent_s = sent["done_s"] + np.float64(start_s)
        return MessageColumns(sent["nbytes"].astype(np.float64), sent_s, arrived_s, posted_s)


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
    return np.array(rows, dtype=MESSAGE)


def _by_peer_and_path(messages: Messages) -> Iterator[tuple[int, Path, Messages]]:
    if not len(messages):
        return
    groups = messages["peer"].astype(np.int64) << 1 | messages["host"]
    order = np.argsort(groups, kind="stable")
    groups = groups[order]
    begins = np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(groups)]])
    for begin, end in pairwise(begins.tolist()):
        group = int(groups[begin])
        yield group >> 1, Path.HOST if group & 1 else Path.DEVICE, messages[order[begin:end]]


def _codes(messages: Messages) -> npt.NDArray[np.int64]:
    """Keys of one iteration and link as numbers."""
    chunk, gradient = messages["chunk"].astype(np.int64), messages["gradient"].astype(np.int64)
    return messages["micro_batch"].astype(np.int64) << 17 | chunk << 1 | gradient
