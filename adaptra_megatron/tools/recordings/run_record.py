# SPDX-License-Identifier: Apache-2.0
"""Read a run from its directory: traces of one pipeline, events, and the parts between changes."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.telemetry.event_log import FILE_PATTERN as EVENT_FILES
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import (
    IterationsTimed,
    LinkDetection,
    PlanSwitched,
    RanksLost,
    RunStarted,
    StageDetection,
    StampedEvent,
    StragglerDetection,
)
from adaptra_megatron.telemetry.trace import FILE_PATTERN, RankTrace, TraceError
from adaptra_megatron.tools.recordings.run_files import (
    Numbering,
    cut_short,
    damaged,
    find_pipelines,
    iteration_span_s,
    read_pipelines,
    renumbered,
)

MOST_FILES_TO_COMPARE = 256
"""Maximum number of ranks whose traces are all read to find the slowest pipeline; of more, only the first pipeline is
read."""
STEP = 0.08
"""Relative change of the iteration time, in two consecutive iterations, that begins a new part."""


@dataclass(frozen=True, kw_only=True)
class RunIteration:
    """One training iteration of one pipeline; without records if it was not traced."""

    number: int
    """Megatron's number if the log has it; else the number in traces and events, where evaluations count, too."""
    start_s: float
    """On the job's common clock; 0 if it was not traced."""
    seconds: float
    """From the first start to the last end, over all stages. In a run with only some iterations traced: as measured by
    the leader, for all iterations."""
    records: tuple[ActionRecord, ...] = ()
    arrivals: tuple[ArrivalRecord, ...] = ()
    order: int | None = None
    """Hash of all stages' orders of actions: equal for iterations of the same plan. None if unknown."""

    @property
    def traced(self) -> bool:
        """Whether the iteration was traced."""
        return bool(self.records)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive iterations between two changes."""

    iterations: tuple[RunIteration, ...]
    beginning: tuple[StampedEvent, ...]
    """Detections, rank failures and switches at its beginning."""
    new_order: bool
    """Whether the order of actions has changed; for runs without events."""

    @property
    def first(self) -> int:
        return self.iterations[0].number

    @property
    def last(self) -> int:
        return self.iterations[-1].number

    @property
    def seconds(self) -> float:
        """Median seconds of an iteration."""
        return median(iteration.seconds for iteration in self.iterations)

    @property
    def typical(self) -> RunIteration:
        """The iteration with the median time, among the traced ones if there are any."""
        ordered = sorted(self.traced or self.iterations, key=lambda iteration: iteration.seconds)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def traced(self) -> tuple[RunIteration, ...]:
        """The traced iterations."""
        return tuple(iteration for iteration in self.iterations if iteration.traced)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of a run."""

    directory: Path
    ranks: tuple[int, ...]
    """Global ranks of the shown pipeline, by stage."""
    pipelines: int
    """Number of pipelines. The shown one is the slowest, if known."""
    iterations: tuple[RunIteration, ...]
    events: tuple[StampedEvent, ...]
    parts: tuple[Part, ...]
    stage_count: int = 0
    """Number of stages, including those without a trace."""
    missing: tuple[str, ...] = ()
    """Missing or unreadable files, as sentences."""
    megatron_numbers: bool = False
    """Whether numbers of iterations are Megatron's."""

    @property
    def own_events(self) -> list[StampedEvent]:
        """The events that concern the shown pipeline."""
        return of_replica(self.ranks[0] if self.ranks else 0, self.events)

    @property
    def stages(self) -> int:
        return self.stage_count or len(self.ranks)

    @property
    def traced(self) -> tuple[RunIteration, ...]:
        """The traced iterations."""
        return tuple(iteration for iteration in self.iterations if iteration.traced)


def read_run(directory: Path | str, progress: Progress | None = None) -> RunRecord:
    """Read the traces and events of a run as far as possible; the result's `missing` names the rest.

    Ranks that share a stage are taken in order: the first of each stage form one pipeline, as Megatron places them.
    Raises TraceError if there is neither a trace nor an event, OSError if a file cannot be read.
    """
    directory = Path(directory)
    missing: list[str] = []
    as_counted = _read_events(directory, missing)
    found = find_pipelines(directory, as_counted)
    lanes, events, numbering = found.lanes, renumbered(as_counted), Numbering(as_counted)
    if not lanes and not events:
        raise TraceError(
            f"no {FILE_PATTERN} and no {EVENT_FILES} that can be read in {directory}: was the run started with "
            f"--adaptra-trace-dir {directory}?{''.join(f' {each}' for each in found.missing)}"
        )
    to_read = lanes if sum(map(len, lanes)) <= MOST_FILES_TO_COMPARE else lanes[:1]
    candidates, damage = read_pipelines(to_read, progress)
    missing += [*found.missing, *damage]
    traces: list[RankTrace] = max(_longest_lived(candidates, events), key=_median_seconds, default=[])
    numbered = numbering.of if events else numbered_by_traces(traces)
    missing += cut_short(traces, numbered)
    if traces and events and all(found.stamp.rank != traces[0].rank for found in events):
        missing.append(f"rank {traces[0].rank} left no log: findings and plans are unknown")
    decided_here = of_replica(traces[0].rank if traces else 0, events)
    attempts = _iterations(traces, found.stages)
    # After a rank failure, an iteration is run again under the same number: the later attempt was committed.
    seen = {number: replace(each, number=number) for each in attempts for number in [numbered(each.number)]}
    iterations = _with_times(list(seen.values()), decided_here)
    return RunRecord(
        directory=directory,
        ranks=tuple(trace.rank for trace in traces),
        pipelines=max(1, len(lanes)),
        iterations=tuple(iterations),
        events=tuple(events),
        parts=tuple(find_parts(iterations, decided_here)),
        stage_count=found.stages,
        missing=tuple(missing),
        megatron_numbers=numbering.known or not events,
    )


def numbered_by_traces(traces: Sequence[RankTrace]) -> Callable[[int], int]:
    """Return a function that numbers iterations as if the processes had begun with Megatron's first one, without a
    log."""
    kinds: dict[int, set[str]] = defaultdict(set)
    for trace in traces:
        for record in trace.records:
            kinds[record.iteration].add(record.kind)
    evaluations = sorted(number for number, found in kinds.items() if not found & {"B", "I"})
    return lambda iteration: iteration + 1 - bisect_left(evaluations, iteration)


def _read_events(directory: Path, missing: list[str]) -> list[StampedEvent]:
    """Read the event log; its damage is added to `missing`."""
    damage: dict[Path, list[str]] = defaultdict(list)
    events = read_events(directory, lambda problem: damage[problem.path].append(problem.of_line))
    for path, problems in sorted(damage.items()):
        missing += damaged(path, problems)
    return events


def _longest_lived(pipelines: list[list[RankTrace]], events: Sequence[StampedEvent]) -> list[list[RankTrace]]:
    """Return all pipelines or, if ranks have failed, those whose ranks were all live for the longest time."""
    if not pipelines or not any(isinstance(found.event, RanksLost) for found in events):
        return pipelines
    lasts = [
        min(max((record.iteration for record in trace.records), default=-1) for trace in pipeline)
        for pipeline in pipelines
    ]
    longest = max(lasts)
    return [pipeline for pipeline, last in zip(pipelines, lasts, strict=True) if last >= longest - 1]


def find_parts(iterations: Sequence[RunIteration], events: Sequence[StampedEvent]) -> list[Part]:
    """Divide a run where it changed: at detections, switches, new orders of actions, and changes of the iteration
    time."""
    changes: dict[int, list[StampedEvent]] = defaultdict(list)
    if not iterations:
        return []
    numbers = [iteration.number for iteration in iterations]
    for stamped in events:
        if isinstance(stamped.event, (LinkDetection, StageDetection, StragglerDetection, PlanSwitched, RanksLost)):
            at = next((number for number in numbers if number >= began_at(stamped)), None)
            if at is not None:
                changes[at].append(stamped)
    new_orders = {
        index
        for index in range(1, len(iterations))
        if None not in (orders := (iterations[index - 1].order, iterations[index].order)) and orders[0] != orders[1]
    }
    turns = new_orders | {index for index, number in enumerate(numbers) if number in changes}
    starts = [0]
    for index in range(1, len(iterations)):
        # One long iteration is an outlier, unless a detection or switch follows it.
        confirmed = iterations[index : index + (1 if index + 1 in turns else 2)]
        if index in turns or _steps(iterations[starts[-1] : index], confirmed, index + 1 in turns):
            starts.append(index)
    parts = []
    for start, end in zip(starts, [*starts[1:], len(iterations)], strict=True):
        parts.append(
            Part(
                iterations=tuple(iterations[start:end]),
                beginning=tuple(changes[iterations[start].number]),
                new_order=start in new_orders,
            )
        )
    return parts


def began_at(stamped: StampedEvent) -> int:
    """Return the iteration in which the event's change began, which is earlier than its report."""
    since = getattr(stamped.event, "since_iteration", None)
    return stamped.stamp.iteration if since is None else int(since)


def replicas_of(events: Sequence[StampedEvent]) -> dict[int, int]:
    """Return the replica of each rank with a log; 0 if replicas are not named."""
    starts = {found.stamp.rank: found.event for found in events if isinstance(found.event, RunStarted)}
    return {rank: start.layout.get("replica", 0) for rank, start in starts.items()}


def of_replica(rank: int, events: Sequence[StampedEvent]) -> list[StampedEvent]:
    """Return the events of the replica of `rank`; all events if replicas are not named, or share one leader."""
    replicas = replicas_of(events)
    starts = (found.event for found in events if isinstance(found.event, RunStarted))
    if any(start.config.get("reroute", "off") != "off" for start in starts):
        return list(events)
    return [found for found in events if replicas.get(found.stamp.rank, 0) == replicas.get(rank, 0)]


def _with_times(traced: list[RunIteration], events: Sequence[StampedEvent]) -> list[RunIteration]:
    """Return all iterations with a time in the log, if these are more than the traced ones."""
    times_s = {
        number: seconds
        for stamped in events
        if isinstance(stamped.event, IterationsTimed)
        for number, seconds in enumerate(stamped.event.seconds, stamped.event.first)
    }
    known = {iteration.number: iteration for iteration in traced}
    if times_s.keys() <= known.keys():
        return traced
    timed = {number: RunIteration(number=number, start_s=0.0, seconds=seconds) for number, seconds in times_s.items()}
    for number, iteration in known.items():
        timed[number] = replace(iteration, seconds=times_s.get(number, iteration.seconds))
    return [timed[number] for number in sorted(timed)]


def _steps(before: Sequence[RunIteration], after: Sequence[RunIteration], alone: bool) -> bool:
    """Return whether all of `after` are longer, or all are shorter, than `before` usually. `alone`: one iteration
    suffices."""
    if len(after) < 2 and not alone:
        return False
    usual_s = median(iteration.seconds for iteration in before)
    ratios = [iteration.seconds / usual_s for iteration in after]
    return min(ratios) > 1.0 + STEP or max(ratios) < 1.0 - STEP


def _median_seconds(traces: Sequence[RankTrace]) -> float:
    seconds = [iteration.seconds for iteration in _iterations(traces, len(traces))]
    return median(seconds) if seconds else 0.0


def _iterations(traces: Sequence[RankTrace], stages: int) -> list[RunIteration]:
    """Return the training iterations; without records if a stage is missing. An incomplete last one is left out: it is
    still running, or was when the job ended."""
    records: dict[int, dict[int, list[ActionRecord]]] = defaultdict(dict)
    arrivals: dict[int, list[ArrivalRecord]] = defaultdict(list)
    for trace in traces:
        for record in trace.records:
            records[record.iteration].setdefault(record.stage, []).append(record)
        for arrival in trace.arrivals:
            arrivals[arrival.iteration].append(arrival)
    found = []
    last = max(records, default=-1)
    for number, by_stage in sorted(records.items()):
        everything = tuple(record for stage in sorted(by_stage) for record in by_stage[stage])
        whole = len(by_stage) == stages
        if not any(record.kind in "BI" for record in everything) or (number == last and len(by_stage) < len(traces)):
            continue
        start_s, end_s = iteration_span_s(everything)
        found.append(
            RunIteration(
                number=number,
                start_s=start_s,
                seconds=end_s - start_s,
                records=everything if whole else (),
                arrivals=tuple(arrivals[number]) if whole else (),
                order=hash(tuple(record[1:5] for record in everything)) if whole else None,
            )
        )
    return found
