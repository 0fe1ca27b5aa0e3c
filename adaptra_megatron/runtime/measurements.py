# SPDX-License-Identifier: Apache-2.0
"""From what ranks measured in an iteration to the costs a plan is made for."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk
from adaptra_megatron.telemetry.metrics import iteration_span_s
from adaptra_megatron.telemetry.records import ActionRecord
from adaptra_megatron.transport.messages import MessageKey, MessageTimes

LINK_QUANTILE = 0.75
"""Over-estimating a delay costs memory, under-estimating costs time; beyond this quantile, noise of the CPU rules."""
MIN_MESSAGES = 3
"""Fewer messages say nothing of a link."""


@dataclass(frozen=True)
class StageMeasurement:
    """One rank's iteration. All moments are on the job's common clock, in seconds."""

    pipeline: int
    """Which of the job's parallel pipelines (the first global rank of its pipeline group)."""
    stage: int
    micro_batches: int
    compute_s: Mapping[str, tuple[float | None, ...]]
    """By kind ("F", "B", "I", "W"): median seconds per chunk, None where no such action ran."""
    sent: tuple[tuple[int, MessageKey, float], ...]
    """(target stage, key, sent at)."""
    received: tuple[tuple[int, MessageKey, float, float], ...]
    """(source stage, key, receive posted at, arrived at)."""
    span_s: tuple[float, float] = (0.0, 0.0)
    """Start of the first action and end of the last one."""
    busy_s: float = 0.0
    """Seconds of it spent computing."""


def stage_measurement(
    pipeline: int,
    stage: int,
    chunks: int,
    micro_batches: int,
    records: Iterable[ActionRecord],
    times: tuple[Sequence[MessageTimes], Sequence[MessageTimes]],
    clock_offset_s: float,
) -> StageMeasurement:
    """Condense one rank's records; `clock_offset_s` is added to its local moments."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    sent, received = times
    records = list(records)
    for record in records:
        seconds[record.kind, record.chunk].append(record.compute_s)
    start_s, end_s = iteration_span_s(records)
    return StageMeasurement(
        span_s=(start_s + clock_offset_s, end_s + clock_offset_s),
        busy_s=sum(record.compute_s for record in records),
        pipeline=pipeline,
        stage=stage,
        micro_batches=micro_batches,
        compute_s={
            kind.value: tuple(
                statistics.median(seconds[kind.value, chunk]) if seconds[kind.value, chunk] else None
                for chunk in range(chunks)
            )
            for kind in Kind
        },
        sent=tuple((entry.peer, entry.key, entry.posted_s + clock_offset_s) for entry in sent),
        received=tuple(
            (entry.peer, entry.key, entry.posted_s + clock_offset_s, entry.done_s + clock_offset_s)
            for entry in received
        ),
    )


def mean_idle_share(measurements: Sequence[StageMeasurement]) -> float:
    """Fraction of the iteration, 0..1, in which a rank did not compute: the mean over all ranks."""
    start_s = min(measurement.span_s[0] for measurement in measurements)
    end_s = max(measurement.span_s[1] for measurement in measurements)
    return 1.0 - statistics.fmean(measurement.busy_s for measurement in measurements) / (end_s - start_s)


def one_way_delays(measurements: Iterable[StageMeasurement]) -> dict[tuple[int, int], list[list[float]]]:
    """Per directed link, per pipeline: seconds from send to arrival of the messages that were awaited when sent."""
    sent_at: dict[tuple[int, int, int, MessageKey], float] = {}
    measurements = list(measurements)
    for measurement in measurements:
        for target, key, moment in measurement.sent:
            sent_at[measurement.pipeline, measurement.stage, target, key] = moment
    delays: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for measurement in measurements:
        for source, key, posted, arrived in measurement.received:
            sent = sent_at.get((measurement.pipeline, source, measurement.stage, key))
            if sent is not None and posted <= sent:
                delays[measurement.pipeline, source, measurement.stage].append(max(0.0, arrived - sent))
    by_link: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    for (_pipeline, source, target), values in delays.items():
        by_link[source, target].append(values)
    return dict(by_link)


def estimate_costs(
    measurements: Sequence[StageMeasurement],
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    can_split: bool,
    caps: tuple[float | None, ...],
    released_at_backward_input: float,
    previous: Costs | None,
) -> Costs | None:
    """Costs of the slowest pipeline, stage by stage and link by link; None until every action has been measured.

    A stage whose backwards ran whole (in an iteration in stock's order, say) keeps its costs from `previous`. Where
    they cannot be split at all, the whole backward counts as input gradient.
    """
    forward = _slowest(measurements, Kind.FORWARD, stages, chunks)
    backward_input = _slowest(measurements, Kind.BACKWARD_INPUT if can_split else Kind.BACKWARD, stages, chunks)
    backward_weight = _slowest(measurements, Kind.BACKWARD_WEIGHT, stages, chunks)
    if not can_split:
        backward_weight = [[0.0] * chunks for _ in range(stages)]
    if previous is not None:
        _fill(backward_input, previous.backward_input_s)
        _fill(backward_weight, previous.backward_weight_s)
    tables = [_complete(rows) for rows in (forward, backward_input, backward_weight)]
    if any(table is None for table in tables):
        return None
    forward_s, backward_input_s, backward_weight_s = (table for table in tables if table is not None)
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links=_links(measurements, previous),
        max_in_flight=caps,
        released_at_backward_input=released_at_backward_input,
    )


_Rows = list[list[float | None]]


def _slowest(measurements: Sequence[StageMeasurement], kind: Kind, stages: int, chunks: int) -> _Rows:
    """Seconds per stage and chunk, the slowest pipeline's; None where no such action ran."""
    rows: _Rows = [[None] * chunks for _ in range(stages)]
    for measurement in measurements:
        row = rows[measurement.stage]
        for chunk, seconds in enumerate(measurement.compute_s[kind.value]):
            if seconds is not None:
                row[chunk] = max(seconds, row[chunk] or 0.0)
    return rows


def _fill(rows: _Rows, fallback: Sequence[Sequence[float]]) -> None:
    for row, fallback_row in zip(rows, fallback, strict=True):
        row[:] = [known if value is None else value for value, known in zip(row, fallback_row, strict=True)]


def _complete(rows: _Rows) -> PerChunk | None:
    table = tuple(tuple(value for value in row if value is not None) for row in rows)
    return table if all(len(seconds) == len(row) for seconds, row in zip(table, rows, strict=True)) else None


def _links(measurements: Sequence[StageMeasurement], previous: Costs | None) -> dict[tuple[int, int], LinkCost]:
    links = dict(previous.links) if previous is not None else {}
    for link, pipelines in one_way_delays(measurements).items():
        latencies = [quantile(delays, LINK_QUANTILE) for delays in pipelines if len(delays) >= MIN_MESSAGES]
        if latencies:
            links[link] = LinkCost(latency_s=max(latencies))
    return links


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
