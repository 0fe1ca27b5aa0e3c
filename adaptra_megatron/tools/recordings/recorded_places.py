# SPDX-License-Identifier: Apache-2.0
"""Find the stage and replica of each range of a recording.

Both are read from labels: in arguments, names of threads and processes, Kineto's distributedInfo, and virtual stages
of torch.distributed.pipelining. If labels are missing, the user gives the numbers, or they are inferred from ranks and
process numbers, with a note. None is assumed to be 0. Of ranks that share a cell (tensor parallelism), the first
stands for all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.ir import Placement, ScheduleError
from adaptra_megatron.tools.recordings.ranges import PLACE, FileRanges, Range
from adaptra_megatron.tools.recordings.recording import RecordingError, numbered

_RANK_IN_NAME = re.compile(r"rank[ _-]*(\d{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,9}")
MOST_STAGES = 1 << 14

ASK_STAGES = "give the pipeline size (`adaptra analyze --stages`, `adaptra plan` and `simulate --pipeline-size`)"
SAY_STAGE = "name it in args (pp_rank), or name processes or threads such as 'stage 1'"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The user's values for what a recording lacks."""

    stages: int | None = None
    replicas: int | None = None


class Source(NamedTuple):
    """A process in a file, taken for one rank."""

    file: int
    process: str


class Placed(NamedTuple):
    """A recorded range, the cell that ran it, and the number of its file."""

    cell: Cell
    range: Range
    file: int


@dataclass
class Places:
    """Cells of the ranges of a recording."""

    placed: list[Placed]
    placement: Placement | None = None
    notes: list[str] = field(default_factory=list)


class _Label(NamedTuple):
    """Labels of a source; None if unknown."""

    stage: int | None
    replica: int | None
    lane: int | None
    rank: int | None


def places_of(path: Path, files: Sequence[FileRanges], asked: Asked) -> Places:
    """Return the cells of all ranges. Raises RecordingError if they are unknown."""
    _check_world(path, files)
    _check_mixed(path, files)
    labels = _labels(path, files)
    notes: list[str] = []
    if not all(label.stage is not None for label in labels.values()):
        labels = _staged(path, files, labels, asked, notes)
    labels = _counted_from_0(path, labels, notes)
    labels = _with_replicas(path, labels, asked, notes)
    chosen = _first_lanes(labels, notes)
    placed = [
        Placed(Cell(label.replica or 0, label.stage or 0), each, source.file)
        for source, ranges in _by_source(files).items()
        for each in ranges
        if (label := labels[_key(source, each)]) and _key(source, each) in chosen
    ]
    _check_whole(path, {each.cell for each in placed})
    return Places(placed, _placement(placed), notes)


_Key = tuple[Source, tuple[int | None, ...]]
"""A source, and the place labels of a range: one process may hold the threads of several stages."""
_Labels = dict[_Key, _Label]


def _by_source(files: Sequence[FileRanges]) -> dict[Source, list[Range]]:
    found: dict[Source, list[Range]] = defaultdict(list)
    for number, file in enumerate(files):
        for each in file.ranges:
            # A file with a rank is that rank's, with one process on the host and one for its GPU.
            found[Source(number, "" if file.rank is not None else each.thread[0])].append(each)
    return found


def _key(source: Source, each: Range) -> _Key:
    return source, tuple(each.labels.get(label) for label in PLACE)


def _labels(path: Path, files: Sequence[FileRanges]) -> _Labels:
    ranks = ranks_of_files(files)
    found: _Labels = {}
    for source, ranges in _by_source(files).items():
        groups, own = files[source.file].groups, files[source.file].rank
        known = {kind: ranks_of.index(own) for kind, ranks_of in groups.items() if own is not None and own in ranks_of}
        for each in ranges:
            key = _key(source, each)
            if key not in found:
                stage, replica, lane, rank = key[1]
                found[key] = _Label(
                    known.get("stage") if stage is None else stage,
                    known.get("replica") if replica is None else replica,
                    known.get("lane") if lane is None else lane,
                    ranks[source.file] if rank is None else rank,
                )
    if (most := max((label.stage or 0 for label in found.values()), default=0)) >= MOST_STAGES:
        raise RecordingError(f"{path} names a stage {most}: {MOST_STAGES} stages at most are read")
    return found


def ranks_of_files(files: Sequence[FileRanges]) -> list[int | None]:
    """Return the rank of each file, from its content, or else from distinct numbers in the names; None if unknown."""
    if all(file.rank is not None for file in files):
        return [file.rank for file in files]
    if len(files) == 1:
        return [None]
    names = [file.path.name for file in files]
    named = [int(found[1]) if (found := _RANK_IN_NAME.search(name)) else None for name in names]
    if None in named:
        numbers = [_NUMBER.findall(name) for name in names]
        varying = (
            [place for place in range(len(numbers[0])) if len({each[place] for each in numbers}) > 1]
            if (len({len(each) for each in numbers}) == 1)
            else []
        )
        named = [int(each[varying[0]]) for each in numbers] if len(varying) == 1 else [None] * len(files)
    return named if len(set(named)) == len(named) else [None] * len(files)


def _check_world(path: Path, files: Sequence[FileRanges]) -> None:
    """Check that no rank is missing, if the number of ranks is known."""
    world = max((file.world_size or 0 for file in files), default=0)
    there = {file.rank for file in files if file.rank is not None}
    if not world or not there or len(there) < len(files):
        if len(there) and len(there) < len(files) and all(file.rank is not None for file in files):
            raise RecordingError(
                f"{path} has several files of one rank: name the directory of one run and one recording"
            )
        return
    missing = sorted(set(range(world)) - there)
    if missing:
        raise RecordingError(
            f"{path} has rank{'s' if len(there) > 1 else ''} {numbered(there)} of a job of {world}; missing: "
            f"{numbered(missing)}. Name the directory with the traces of all ranks"
        )


def _check_mixed(path: Path, files: Sequence[FileRanges]) -> None:
    for file in files:
        if file.on_host_alone:
            raise RecordingError(
                f"{file.path}: kernels ran on a GPU, but forwards and backwards are known on the host alone, which is "
                "when they were launched: record with a torch.profiler that writes gpu_user_annotation (torch 2.1 on)"
            )


def _staged(path: Path, files: Sequence[FileRanges], labels: _Labels, asked: Asked, notes: list[str]) -> _Labels:
    """Return the labels with stages, from virtual stages, ranks, or process numbers."""
    if any(label.stage is not None for label in labels.values()):
        odd = next(key for key, label in labels.items() if label.stage is None)
        raise RecordingError(
            f"{files[odd[0].file].path}: some actions name their stage, those of process "
            f"{odd[0].process or odd[0].file} do not: {SAY_STAGE}"
        )
    by_key: dict[_Key, set[int | None]] = defaultdict(set)
    for source, ranges in _by_source(files).items():
        for each in ranges:
            by_key[_key(source, each)].add(each.virtual_stage)
    if not any(None in held for held in by_key.values()):
        firsts = sorted({min(held) for held in by_key.values()})  # type: ignore[type-var]
        return {key: label._replace(stage=firsts.index(min(by_key[key]))) for key, label in labels.items()}  # type: ignore[type-var]
    if all(label.rank is not None for label in labels.values()):
        return _staged_by_rank(path, labels, asked, notes)
    processes = sorted({key[0].process for key in labels})
    if len(files) == 1 and len(processes) > 1 and processes == sorted(map(str, range(len(processes)))):
        if asked.stages not in (None, len(processes)):
            raise RecordingError(
                f"{path} has {len(processes)} processes and names no ranks: they are not the {asked.stages} of --stages"
            )
        notes.append(
            f"No event names its stage: processes 0-{len(processes) - 1} are taken for stages 0-{len(processes) - 1}."
        )
        return {key: label._replace(stage=int(key[0].process)) for key, label in labels.items()}
    if len(labels) == 1 and asked.stages == 1:
        return {key: label._replace(stage=0) for key, label in labels.items()}
    threads = "" if len(files) > 1 or len(processes) > 1 else ", and all are of one process"
    raise RecordingError(f"{path} does not say on which stage its actions ran{threads}: {SAY_STAGE}")


def _staged_by_rank(path: Path, labels: _Labels, asked: Asked, notes: list[str]) -> _Labels:
    """Return the labels with stages as Megatron numbers ranks: pipeline stages outermost, tensor parallelism
    innermost."""
    ranks = {label.rank for label in labels.values() if label.rank is not None}
    count = 1 + max(ranks)
    if missing := sorted(set(range(min(count, 1 << 20))) - ranks):
        raise RecordingError(
            f"{path} has ranks {numbered(ranks)}; missing: {numbered(missing)}. Name all ranks' traces"
        )
    if asked.stages is None or count % asked.stages:
        raise RecordingError(
            f"{path} has traces of {count} rank{'s' if count > 1 else ''} that do not say on which stage they ran: "
            f"{ASK_STAGES}, a divisor of {count}, or {SAY_STAGE}"
        )
    each = count // asked.stages
    return {key: label._replace(stage=label.rank // each) for key, label in labels.items() if label.rank is not None}


def _counted_from_0(path: Path, labels: _Labels, notes: list[str]) -> _Labels:
    stages = sorted({label.stage for label in labels.values() if label.stage is not None})
    first = stages[0]
    if first > 1 or stages[-1] - first != len(stages) - 1:
        missing = sorted(set(range(stages[-1])) - set(stages))
        raise RecordingError(
            f"{path} has stages {numbered(stages)} of a pipeline; missing: {numbered(missing)}. A job can be replayed "
            "with all its stages alone"
        )
    if first == 1:
        notes.append(
            f"Stages are named from 1 on: stage 1 is called stage 0 here, stage {stages[-1]} {stages[-1] - 1}."
        )
        return {key: label._replace(stage=(label.stage or 0) - 1) for key, label in labels.items()}
    return labels


def _with_replicas(path: Path, labels: _Labels, asked: Asked, notes: list[str]) -> _Labels:
    known = {label.replica is not None for label in labels.values()}
    if known == {True}:
        return labels
    if known == {True, False}:
        raise RecordingError(f"{path}: some actions name their replica (dp_rank), others do not: name it for all")
    by_stage: dict[int, set[tuple[int, Source]]] = defaultdict(set)
    for (source, _), label in labels.items():
        by_stage[label.stage or 0].add((-1 if label.rank is None else label.rank, source))
    most = max(map(len, by_stage.values()))
    if most == 1:
        return {key: label._replace(replica=0) for key, label in labels.items()}
    if all(label.lane is not None for label in labels.values()):
        lanes = {(label.stage, label.lane) for label in labels.values()}
        if len(lanes) == len({(label.stage, label.lane, source) for (source, _), label in labels.items()}):
            return {key: label._replace(replica=0) for key, label in labels.items()}
    if any(label.rank is None for label in labels.values()) or len(set(map(len, by_stage.values()))) > 1:
        raise RecordingError(
            f"{path}: {most} processes name one stage and no replica: name it in args (dp_rank), or lanes of tensor "
            "parallelism (tp_rank)"
        )
    for ranks in by_stage.values():
        if len({rank for rank, _ in ranks}) < len(ranks):
            raise RecordingError(
                f"{path} has several processes of one rank, as if it held two runs: name one run alone"
            )
    count = asked.replicas or most
    if most % count:
        raise RecordingError(f"{path} has {most} ranks of each stage: they are no {count} replicas")
    if asked.replicas is None:
        notes.append(
            f"No event names its replica: the {most} ranks of each stage are taken for replicas (--replicas says how "
            "many there are where ranks share a stage's work)."
        )
    lanes_each = most // count
    found: _Labels = {}
    for key, label in labels.items():
        place = [rank for rank, _ in sorted(by_stage[label.stage or 0])].index(label.rank or 0)
        found[key] = label._replace(replica=place // lanes_each, lane=place % lanes_each)
    return found


def _first_lanes(labels: _Labels, notes: list[str]) -> set[_Key]:
    """Return the keys of the first lane of each cell."""
    lanes: dict[tuple[int | None, int | None], set[int]] = defaultdict(set)
    for label in labels.values():
        lanes[label.stage, label.replica].add(label.lane or 0)
    most = max(map(len, lanes.values()))
    if most > 1:
        notes.append(f"Of the {most} ranks that share a stage's work, the first stands for all.")
    return {key for key, label in labels.items() if (label.lane or 0) == min(lanes[label.stage, label.replica])}


def _check_whole(path: Path, cells: Iterable[Cell]) -> None:
    there = set(cells)
    for replica in sorted({cell.replica for cell in there}):
        stages = {cell.stage for cell in there if cell.replica == replica}
        every = {cell.stage for cell in there}
        if missing := sorted(every - stages):
            raise RecordingError(f"{path} has no actions of stage {numbered(missing)} of replica {replica}")


def _placement(placed: Sequence[Placed]) -> Placement | None:
    """Return the placement of the virtual stages; None if they are not named."""
    stage_of: Mapping[int, int] = {
        each.range.virtual_stage: each.cell.stage for each in placed if each.range.virtual_stage is not None
    }
    if not stage_of:
        return None
    if sorted(stage_of) != list(range(len(stage_of))):
        raise RecordingError(f"virtual stages {numbered(stage_of)} are named: some are missing")
    try:
        return Placement(tuple(stage_of[virtual] for virtual in range(len(stage_of))))
    except ScheduleError as error:
        raise RecordingError(f"virtual stages cannot be placed: {error}") from error
