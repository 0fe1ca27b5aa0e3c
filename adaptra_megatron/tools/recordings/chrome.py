# SPDX-License-Identifier: Apache-2.0
"""Read Chrome traces in JSON whose forwards and backwards are named: Megatron's, MegaScan's, ours, and Kineto's.

An event's name gives its type: forward, fwd or F; backward, bwd or B; I and W for the parts of a backward; `PP:1F2` as
in torch.distributed.pipelining; everything else as in `OpType`. The micro-batch ("F 3", "fwd_mb3_iter0") and the chunk
("F 3 chunk 1") may follow. `args` may give all of it, too: see `naming`. `ranges` selects the actions,
`recorded_places` finds where they ran, `recorded_steps` forms steps. A directory holds one file per rank, or
sub-directories for some steps each. Files are read one at a time, large ones by several processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from adaptra_megatron.schedule.ir import Placement
from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.tools.recordings.ranges import FileRanges, read_ranges
from adaptra_megatron.tools.recordings.recorded_places import Asked, Places, places_of
from adaptra_megatron.tools.recordings.recorded_steps import (
    ONE_AT_A_TIME,
    RecordedAction,
    Steps,
    check_one_job,
    steps_of,
    without_waits,
)
from adaptra_megatron.tools.recordings.recording import (
    ALL_STEPS,
    MOST_NAMED,
    NoTraceError,
    Recording,
    RecordingError,
    Wanted,
    understood,
)
from adaptra_megatron.tools.recordings.run_files import in_processes
from adaptra_megatron.tools.recordings.trace_events import head_of, refuse_other_formats

SUFFIXES = (".json", ".json.gz", ".json.bz2", ".json.xz")
_NUMBERS = re.compile(r"(\d+)")
_FOLDER_STEP = re.compile(r"(?:iteration|step)[ _-]*(\d{1,18})", re.IGNORECASE)


def read_chrome(
    path: Path, wanted: Wanted = ALL_STEPS, asked: Asked | None = None, progress: Progress | None = None
) -> Recording:
    """Read the steps of a trace, or of a directory of traces, one per rank.

    Raises RecordingError if it is no such trace, has no named forwards and backwards, or does not say where they ran.
    Raises OSError if a file cannot be read.
    """
    notes: list[str] = []
    merged = Steps()
    placement: Placement | None = None
    for folder, paths in _groups(path):
        files = _read_all(path, paths, notes, progress)
        places = places_of(path, files, asked or Asked())
        found = _steps(path, files, places, folder, wanted)
        taken = {step.number for step in merged.steps}
        if again := sorted(step.number for step in found.steps if step.number in taken):
            raise RecordingError(f"{path} has step {again[0]} in several sub-directories: name one of them")
        merged.steps += found.steps
        merged.left_out += found.left_out
        notes += [each for each in (*places.notes, *found.notes) if each not in notes]
        if placement not in (None, places.placement):
            raise RecordingError(f"{path}: sub-directories are of different jobs: name one of them")
        placement = places.placement
    return understood(
        name=str(path), source="a Chrome trace", steps=merged.steps, left_out=merged.left_out, notes=notes
    )


def _groups(path: Path) -> Iterator[tuple[Path | None, list[Path]]]:
    """Yield groups of files with the same steps: those of a directory, or of each sub-directory."""
    if not path.is_dir():
        yield None, [path]
        return
    if found := traces_in(path):
        yield None, found
        return
    folders = [each for each in sorted(path.iterdir(), key=_naturally) if each.is_dir()]
    groups = [(folder, found) for folder in folders if (found := traces_in(folder))]
    if not groups:
        raise RecordingError(f"{path} has neither rank-*.jsonl, which --adaptra-trace-dir writes, nor traces in JSON")
    yield from groups


def traces_in(directory: Path) -> list[Path]:
    """Return the files that may be traces, in the order of the numbers in their names."""
    found = (each for each in directory.iterdir() if each.name.endswith(SUFFIXES) and each.is_file())
    return sorted(found, key=_naturally)


def _naturally(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts rank2 before rank10."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in _NUMBERS.split(path.name)
    ]


def _read_all(path: Path, paths: Sequence[Path], notes: list[str], progress: Progress | None) -> list[FileRanges]:
    """Read all files; those of a directory that are no traces are left out."""
    found: list[FileRanges] = []
    others: list[NoTraceError] = []
    if progress is not None:
        progress("reading traces", 0, len(paths))
    for number, each in enumerate(_in_processes(paths), start=1):
        if isinstance(each, NoTraceError):
            others.append(each)
        else:
            found.append(each)
        if progress is not None:
            progress("reading traces", number, len(paths))
    if not found:
        raise others[0]
    if others:
        notes.append(
            f"{len(others)} file{'s are' if len(others) > 1 else ' is'} left out: {others[0].name} is no trace."
        )
    for file in found:
        if not file.ranges:
            raise _nothing_named(path if len(found) == 1 else file.path, file)
        notes += _notes_of(file, alone=len(found) == 1)
    return found


def _in_processes(paths: Sequence[Path]) -> Iterator[FileRanges | NoTraceError]:
    try:
        yield from in_processes(_read, paths)
    except BrokenProcessPool as error:
        raise RecordingError(f"a process that read {paths[0].parent} was killed: is there enough memory?") from error


def _read(path: Path) -> FileRanges | NoTraceError:
    refuse_other_formats(path, head_of(path))
    try:
        return read_ranges(path)
    except NoTraceError as error:
        return error


def _nothing_named(path: Path, file: FileRanges) -> RecordingError:
    there = f"; the ranges in it are called {', '.join(map(repr, file.names))}" if file.names else ""
    left_out = "; ".join(list(file.left_out)[:MOST_NAMED])
    return RecordingError(
        f"{path} names no forwards and backwards{there}: ranges have to be called forward and backward, or F and B, "
        "with micro-batches (record_function around the steps of the schedule makes them)"
        + (f". Left out: {left_out}" if left_out else "")
    )


def _notes_of(file: FileRanges, *, alone: bool) -> Iterator[str]:
    where = "" if alone else f" of {file.path.name}"
    for what, count in file.left_out.items():
        more = f", and {count - 1} more like it" if count > 1 else ""
        yield f"Left out{where}: {what}{more}."
    if file.insides:
        apart = (
            f"; if the {file.hidden} is no part, actions of a stage ran side by side: {ONE_AT_A_TIME}"
            if file.hidden
            else ""
        )
        yield f"{file.insides} ranges{where} inside other forwards and backwards are parts of them{apart}."
    if file.divided:
        yield (
            f"{file.divided} ranges{where} hold a forward and a backward (OVERLAP_F_B): divided in proportion to "
            "their times alone."
        )
    if file.waits:
        yield f"{file.waits} ranges{where} contain the wait for their message: it is removed."
    if file.unfinished:
        yield f"The list of events{where} has no end: the process that wrote it was killed."


def _steps(path: Path, files: Sequence[FileRanges], places: Places, folder: Path | None, wanted: Wanted) -> Steps:
    bases = [file.base_ns for file in files]
    first_ns = min(bases) if all(bases) else None
    origin_us = min(each.range.start_us + _behind_us(bases[each.file], first_ns) for each in places.placed)
    placement = places.placement
    number = _FOLDER_STEP.search(folder.name) if folder is not None else None
    actions = []
    for cell, each, file in places.placed:
        start_us = each.start_us + _behind_us(bases[file], first_ns) - origin_us
        chunk = each.labels.get("chunk", 0)
        if placement is not None and each.virtual_stage is not None:
            chunk = placement.places[each.virtual_stage].chunk
        step = each.labels.get("step", None if number is None else int(number[1]))
        micro_batch = each.labels.get("micro_batch")
        duration_s = 1e-6 * (each.end_us - each.start_us)
        actions.append(RecordedAction(cell, each.optype, step, chunk, micro_batch, 1e-6 * start_us, duration_s))
    check_one_job(str(path), actions)
    found = steps_of(str(path), actions, wanted, placement)
    if placement is not None and not any(each.range.on_gpu for each in places.placed):
        found.steps = without_waits(found.steps, found.notes)
    return found


def _behind_us(base_ns: int, first_ns: int | None) -> float:
    """Return the microseconds by which the time origin of a file is later than that of the first one."""
    return 0.0 if first_ns is None else (base_ns - first_ns) / 1e3
