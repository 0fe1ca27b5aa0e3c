# SPDX-License-Identifier: Apache-2.0
"""Read the files of a run's directory as far as possible, and convert iterations to Megatron's numbers.

Missing or damaged files are named, the rest is used. Megatron counts iterations from 1 and over restarts; a process
counts from 0.
"""

from __future__ import annotations

import multiprocessing
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from adaptra_megatron.common.reasons import reason_text, with_numbers
from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    IterationsTimed,
    LinkDetection,
    PathChosen,
    PlanMade,
    RoutesChosen,
    RunStarted,
    StageDetection,
    StampedEvent,
    StragglerDetection,
)
from adaptra_megatron.telemetry.trace import FILE_PATTERN, RankTrace, TraceError, read_trace, read_trace_header

Read = TypeVar("Read")
WORTH_PROCESSES_NBYTES = 16 << 20
"""Total size from which on several processes read faster than one."""
MOST_PROCESSES = 8
MOST_NAMED = 12
"""Maximum number of ranks that a sentence lists; of more, it gives the count."""


class Pipelines(NamedTuple):
    """Trace files of a run by pipeline, then by stage."""

    lanes: list[list[Path]]
    """The most complete pipelines."""
    stages: int
    missing: list[str]
    """Missing or unreadable files, as sentences."""


def find_pipelines(directory: Path, events: Sequence[StampedEvent]) -> Pipelines:
    """Find the traces of `directory` and group them as Megatron places ranks: those of a stage are consecutive, and
    the first of each stage form one pipeline."""
    missing: list[str] = []
    stage_of: dict[int, int] = {}
    paths: dict[int, Path] = {}
    for path in sorted(directory.glob(FILE_PATTERN)):
        try:
            header = read_trace_header(path)
        except (TraceError, UnicodeDecodeError) as error:
            missing.append(f"{path.name} is left out: {error}")
            continue
        stage_of[header.rank], paths[header.rank] = header.stage, path
    layouts = [found.event.layout for found in events if isinstance(found.event, RunStarted)]
    stages = max([1 + max(stage_of.values(), default=-1), *(layout.get("stages", 0) for layout in layouts)])
    world_size = max((layout.get("world_size", 0) for layout in layouts), default=0)
    lanes = _lanes(stage_of, stages, world_size)
    if stage_of:
        if gone := sorted(set(range(world_size)) - set(stage_of)):
            missing.append(f"{_ranks(gone)} left no trace: copy the files of all hosts into one directory")
        elif empty := sorted(set(range(stages)) - set(stage_of.values())):
            names = f"stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}"
            missing.append(f"{names} left no trace: copy the files of all hosts into one directory")
    whole = [lane for lane in lanes if None not in lane] or sorted(lanes, key=lambda lane: lane.count(None))[:1]
    return Pipelines([[paths[rank] for rank in lane if rank is not None] for lane in whole], stages, missing)


def _lanes(stage_of: dict[int, int], stages: int, world_size: int) -> list[list[int | None]]:
    """Return the ranks of each pipeline, by stage; None for one without a trace."""
    by_stage: dict[int, list[int]] = defaultdict(list)
    for rank, stage in sorted(stage_of.items()):
        by_stage[stage].append(rank)
    counts = {len(by_stage[stage]) for stage in range(stages)}
    if len(counts) > 1:
        width = -(-max(world_size, 1 + max(stage_of)) // stages)
        if all(stage == rank // width for rank, stage in stage_of.items()):
            return [
                [rank if (rank := stage * width + lane) in stage_of else None for stage in range(stages)]
                for lane in range(width)
            ]
    return [
        [ranks[lane] if lane < len(ranks := by_stage[stage]) else None for stage in range(stages)]
        for lane in range(max(counts, default=0))
    ]


def read_pipelines(
    lanes: Sequence[Sequence[Path]], progress: Progress | None
) -> tuple[list[list[RankTrace]], list[str]]:
    """Read the traces of each lane; return them and the damage of their files. Several processes read large ones.

    Raises OSError if a file cannot be read.
    """
    paths = [path for lane in lanes for path in lane]
    traces: dict[Path, RankTrace] = {}
    missing: list[str] = []
    for number, (path, (trace, damage)) in enumerate(zip(paths, in_processes(_read, paths), strict=True), start=1):
        traces[path] = trace
        missing += damage
        if progress is not None:
            progress("reading traces", number, len(paths))
    return [[traces[path] for path in lane] for lane in lanes], missing


def in_processes(read: Callable[[Path], Read], paths: Sequence[Path]) -> Iterator[Read]:
    """Yield what `read` returns for each of `paths`, in order: by several processes if the files are large. Raises
    BrokenProcessPool if one of them is killed."""
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(paths))
    if processes < 2 or sum(path.stat().st_size for path in paths) < WORTH_PROCESSES_NBYTES:
        yield from map(read, paths)
        return
    # No fork: a program that draws a progress bar has threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver")) as pool:
        yield from pool.map(read, paths)


def _read(path: Path) -> tuple[RankTrace, list[str]]:
    damage: list[str] = []
    trace = read_trace(path, damage.append)
    return trace, damaged(path, damage)


def damaged(path: Path, lines: Sequence[str]) -> list[str]:
    """Return a sentence on damaged lines of `path`, if there are any. `lines`: what is wrong with each."""
    if not lines:
        return []
    count = f"{len(lines)} line{'s' if len(lines) > 1 else ''}"
    return [f"{path.name}: {count} left out, the first because {lines[0].removeprefix(f'{path}, ')}"]


def cut_short(traces: Sequence[RankTrace], numbered: Callable[[int], int]) -> list[str]:
    """Return sentences on ranks whose traces end before those of the others, by more than the current iteration.
    `numbered`: converts numbers of iterations."""
    last = {trace.rank: max((record.iteration for record in trace.records), default=-1) for trace in traces}
    end = max(last.values(), default=-1)
    found = sorted((rank, each) for rank, each in last.items() if each < end - 1)
    return [
        f"rank {rank}: its trace ends {f'in iteration {numbered(each)}' if each >= 0 else 'before the first iteration'}"
        f", those of other stages in iteration {numbered(end)}: of later iterations only times are known"
        for rank, each in found[:MOST_NAMED]
    ]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= MOST_NAMED else f"{len(ranks)} of the ranks"


class Numbering:
    """Megatron's numbers of iterations in one start of a job. An evaluation has the number of the next training
    iteration."""

    def __init__(self, events: Iterable[StampedEvent]) -> None:
        """`events`: the run's log. If it lacks times of iterations, as old logs do, numbers are not
        converted."""
        timed = (found.event for found in events if isinstance(found.event, IterationsTimed))
        # By batch of iterations: the first one, its Megatron number, and the count.
        self._batches = sorted((each.first, each.step, len(each.seconds)) for each in timed if each.step is not None)
        self._firsts = [first for first, _step, _count in self._batches]

    @property
    def known(self) -> bool:
        """Whether Megatron's numbers are known."""
        return bool(self._batches)

    def of(self, iteration: int) -> int:
        """Return Megatron's number of `iteration`."""
        if not self._batches or iteration < 0:
            return iteration
        index = max(0, bisect_right(self._firsts, iteration) - 1)
        first, step, count = self._batches[index]
        within = iteration - first
        if within >= count and index + 1 < len(self._batches):
            return self._batches[index + 1][1]
        return step + within


def renumbered(events: Sequence[StampedEvent]) -> list[StampedEvent]:
    """Return `events` with Megatron's numbers of iterations, also in their reasons."""
    numbering = Numbering(events)
    return [_renumbered(found, numbering) for found in events] if numbering.known else list(events)


def _renumbered(found: StampedEvent, numbering: Numbering) -> StampedEvent:
    event = found.event
    if isinstance(event, IterationsTimed):
        event = replace(event, first=event.first if event.step is None else event.step)
    elif isinstance(event, LinkDetection | StageDetection | PlanMade | PathChosen | RoutesChosen):
        if event.reason_parts:
            parts = with_numbers(event.reason_parts, numbering.of)
            event = replace(event, reason=reason_text(parts), reason_parts=parts)
    elif isinstance(event, ArrivalsSeen):
        event = replace(event, until=numbering.of(event.until))
    if isinstance(event, LinkDetection | StageDetection | StragglerDetection) and event.since_iteration is not None:
        event = replace(event, since_iteration=numbering.of(event.since_iteration))
    stamp = replace(found.stamp, iteration=numbering.of(found.stamp.iteration))
    return StampedEvent(stamp=stamp, event=event)


def iteration_span_s(records: Iterable[ActionRecord]) -> tuple[float, float]:
    """Return `(start_s, end_s)`: the start of the first action of any stage, and the end of the last one.

    Raises ValueError without records.
    """
    starts_s, ends_s = zip(*((record.start_s, record.end_s) for record in records), strict=True)
    return min(starts_s), max(ends_s)


def bubble_fraction(records: Iterable[ActionRecord]) -> dict[int, float]:
    """Return by stage the fraction of one iteration, 0..1, in which it did not compute.

    `records`: of one iteration and of every stage; the iteration lasts from the first start to the last end. Ranks
    that share a stage (data or tensor parallel) count by their mean. Raises ValueError if there are no records, or
    records of several iterations.
    """
    records = list(records)
    iterations = {record.iteration for record in records}
    if len(iterations) != 1:
        raise ValueError(f"the bubble is that of one iteration; got records of iterations {sorted(iterations)}")
    start_s, end_s = iteration_span_s(records)
    computed_s: dict[int, float] = defaultdict(float)
    ranks: dict[int, Counter[tuple[str, int, int]]] = defaultdict(Counter)
    for record in records:
        computed_s[record.stage] += record.compute_s
        ranks[record.stage][record.kind, record.chunk, record.micro_batch] += 1
    return {
        stage: 1.0 - computed_s[stage] / max(ranks[stage].values()) / (end_s - start_s) for stage in sorted(computed_s)
    }
