# SPDX-License-Identifier: Apache-2.0
"""The files of a run's directory, read as far as they go: what is missing or damaged is named, the rest is used."""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from adaptra_megatron.telemetry.events.events import RunStarted, StampedEvent
from adaptra_megatron.telemetry.tracing.trace import FILE_PATTERN, RankTrace, TraceError, read_trace, read_trace_header

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""
WORTH_PROCESSES_NBYTES = 16 << 20
"""Size of all files from which on several processes read them faster than one."""
MOST_PROCESSES = 8
MOST_NAMED = 12
"""Ranks that a sentence names; of more, it says how many there are."""


class Pipelines(NamedTuple):
    """Files of a run by pipeline, each by stage."""

    lanes: list[list[Path]]
    """Those with the most stages; more than one where several are as complete."""
    stages: int
    missing: list[str]
    """What was not found or could not be read, in sentences."""


def find_pipelines(directory: Path, events: Sequence[StampedEvent]) -> Pipelines:
    """The traces of `directory`, put together as Megatron places ranks: those of a stage follow each other, and the
    first of each stage are one pipeline."""
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
    """Ranks of each pipeline, by stage; None for one that left no trace."""
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
    """Traces of each lane, and what of their files is damaged. Large ones are read by several processes.

    Raises OSError if a file cannot be read.
    """
    paths = [path for lane in lanes for path in lane]
    traces: dict[Path, RankTrace] = {}
    missing: list[str] = []
    for number, (path, (trace, damage)) in enumerate(zip(paths, _read_all(paths), strict=True), start=1):
        traces[path] = trace
        missing += damage
        if progress is not None:
            progress("reading traces", number, len(paths))
    return [[traces[path] for path in lane] for lane in lanes], missing


def _read_all(paths: Sequence[Path]) -> Iterator[tuple[RankTrace, list[str]]]:
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(paths))
    if processes < 2 or sum(path.stat().st_size for path in paths) < WORTH_PROCESSES_NBYTES:
        yield from map(_read, paths)
        return
    # No fork: a program that draws a progress bar has threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver")) as pool:
        yield from pool.map(_read, paths)


def _read(path: Path) -> tuple[RankTrace, list[str]]:
    damage: list[str] = []
    trace = read_trace(path, damage.append)
    return trace, damaged(path, damage)


def damaged(path: Path, lines: Sequence[str]) -> list[str]:
    """A sentence about lines of `path` that could not be read, if there are any. `lines`: what is wrong with each."""
    if not lines:
        return []
    count = f"{len(lines)} line{'s' if len(lines) > 1 else ''}"
    return [f"{path.name}: {count} left out, the first because {lines[0].removeprefix(f'{path}, ')}"]


def cut_short(traces: Sequence[RankTrace], numbered: Callable[[int], int]) -> list[str]:
    """Ranks of a pipeline whose traces end before those of the others do, by more than the iteration that runs.
    `numbered`: numbers of iterations to name, by those of the traces."""
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
