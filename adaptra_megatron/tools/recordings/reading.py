# SPDX-License-Identifier: Apache-2.0
"""Find the format of a recording and read it; Chrome traces have a module of their own.

Our own: the directory of a run's --adaptra-trace-dir.

Parquet: op-level traces as published with "Understanding Stragglers in Large Model Training" (OSDI '25). A row is an
operation: `dp_rank`, `stage`, `step`, `optype` (a name of `OpType`), `start_ts` and `duration` in seconds, `seq_id`
(order within type and step), `mc` (model chunk) and `mb_id` (micro-batch, for computation only). Needs pyarrow (`pip
install 'adaptra-megatron[traces]'`), imported when a trace is read.

Primus' pp_data: the output of `dump_pp_data`, a `pp_rank_N.json` per stage, in milliseconds from the stage's own
start. A file has an entry per iteration: `fwd_start`, `fwd_end`, `bwd_start`, `bwd_end` and, for split backwards,
`wgrad_start`, `wgrad_end`, one number per action in the order in which they ran; `fwd_chunk` and `fwd_minibatch` are
optional. Of several replicas, one was dumped.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import LinkDetection, PlanSwitched, RunStarted, StampedEvent
from adaptra_megatron.telemetry.trace import FILE_PATTERN, RankTrace, TraceError, read_trace
from adaptra_megatron.tools.recordings.chrome import read_chrome
from adaptra_megatron.tools.recordings.naming import seconds_of, whole
from adaptra_megatron.tools.recordings.recorded_places import Asked
from adaptra_megatron.tools.recordings.recorded_steps import RecordedAction, steps_of
from adaptra_megatron.tools.recordings.recording import (
    ALL_STEPS,
    Beginning,
    Recording,
    RecordingError,
    Wanted,
    no_such_step,
    numbered,
    understood,
)
from adaptra_megatron.tools.recordings.run_files import Numbering, find_pipelines, renumbered
from adaptra_megatron.tools.recordings.run_record import began_at, numbered_by_traces, replicas_of
from adaptra_megatron.tools.recordings.trace_events import DAMAGED, MOST_NBYTES, PARQUET, head_of, opened
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, ReplayError, with_sequence_numbers
from adaptra_megatron.tools.replay.pipelines import KINDS

_OPTYPES = {str(kind): optype for optype, kind in KINDS.items()}


def read_run_directory(directory: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """Read the training iterations that all cells have finished, by Megatron's numbers if the log has them.

    Computation is recorded; messages only as far as a rank waited for them. Of an iteration that was run again, the
    last run counts. The first rank of a cell stands for all. Raises TraceError and EventLogError as
    `run_record.read_run`, RecordingError if there is no such iteration, or a stage left no trace.
    """
    log = read_events(directory)
    damage: list[str] = []
    cells = _cells(directory, log, damage)
    numbers = Numbering(log).of if log else numbered_by_traces(list(cells.values()))
    steps: dict[int, list[Operation]] = defaultdict(list)
    trained: dict[int, set[Cell]] = defaultdict(set)
    for cell, trace in cells.items():
        for record in trace.records:
            if record.kind in (Kind.BACKWARD.value, Kind.BACKWARD_INPUT.value):
                trained[record.iteration].add(cell)
            optype = _OPTYPES.get(record.kind)
            if optype is None:
                raise RecordingError(f"{directory}: rank {trace.rank} ran an action {record.kind!r}, which is unknown")
            times = (record.start_s, record.compute_s)
            steps[record.iteration].append(Operation(cell, optype, *times, 0, record.chunk, record.micro_batch))
    complete = {numbers(number): number for number in sorted(steps) if len(trained[number]) == len(cells)}
    if complete and not any(number in wanted for number in complete):
        raise no_such_step(str(directory), complete)
    found = understood(
        name=str(directory),
        source="a run's own traces",
        steps=[
            RecordedStep(number=number, operations=with_sequence_numbers(steps[own]))
            for number, own in sorted(complete.items())
            if number in wanted
        ],
        left_out=[
            f"step {numbers(number)} was trained by {len(cells_of)} of {len(cells)} cells: others had failed, or "
            "left no trace of it"
            for number, cells_of in sorted(trained.items())
            if 0 < len(cells_of) < len(cells) and numbers(number) in wanted
        ],
        notes=[f"{problem}." for problem in damage],
        one_clock=True,
    )
    return replace(found, beginnings=tuple(_beginnings(renumbered(log))))


def _beginnings(log: Sequence[StampedEvent]) -> list[Beginning]:
    """Return the iterations in which a link was found to have changed, or plans were switched."""
    whys: dict[int, list[str]] = defaultdict(list)
    for stamped in log:
        event, at = stamped.event, began_at(stamped)
        if isinstance(event, LinkDetection):
            why = f"link {event.source}→{event.target} found {event.after}"
        elif isinstance(event, PlanSwitched):
            why = "another plan"
        else:
            continue
        if why not in whys[at]:
            whys[at].append(why)
    return [Beginning(step=step, why=", ".join(each)) for step, each in sorted(whys.items())]


def _cells(directory: Path, log: Sequence[StampedEvent], damage: list[str]) -> dict[Cell, RankTrace]:
    """Return the trace of the first rank of each cell. If the log names no replicas, each rank of a stage is one.
    Raises RecordingError if a stage of a replica left no trace."""
    pipelines = find_pipelines(directory, log)
    paths = sorted({path for lane in pipelines.lanes for path in lane} | set(directory.glob("rank-*.jsonl")))
    traces = []
    for path in paths:
        try:
            traces.append(read_trace(path, damage.append))
        except TraceError as error:
            damage.append(str(error))
    if not traces:
        raise TraceError(f"{directory} has no trace that can be read: {'; '.join(damage)}")
    traces.sort(key=lambda trace: trace.rank)
    replicas = replicas_of(log)
    named = all(trace.rank in replicas for trace in traces) and len(set(replicas.values())) > 1
    counts: dict[int, int] = defaultdict(int)
    found: dict[Cell, RankTrace] = {}
    for trace in traces:
        replica = replicas[trace.rank] if named else counts[trace.stage]
        counts[trace.stage] += 1
        found.setdefault(Cell(replica, trace.stage), trace)
    layouts = [stamped.event.layout for stamped in log if isinstance(stamped.event, RunStarted)]
    stages = max([pipelines.stages, *(layout.get("stages", 0) for layout in layouts)])
    for replica in sorted({cell.replica for cell in found}):
        if missing := [stage for stage in range(stages) if Cell(replica, stage) not in found]:
            of = f" of replica {replica}" if len(counts) and max(counts.values()) > 1 else ""
            raise RecordingError(
                f"{directory} lacks the traces of stage {numbered(missing)}{of}: "
                f"{'; '.join(pipelines.missing) or 'copy the files of all hosts into one directory'}"
            )
    return found


_FILE = re.compile(r"pp_rank_(\d{1,6})\.json(?:\.gz)?")


def stages_in(directory: Path) -> dict[int, Path]:
    """Return the files pp_rank_N.json of a directory, by stage."""
    found = {int(match[1]): each for each in directory.iterdir() if (match := _FILE.fullmatch(each.name)) is not None}
    return dict(sorted(found.items()))


def read_primus(directory: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """Read the iterations of all stages. Raises RecordingError for other files, or if a stage is missing."""
    paths = stages_in(directory)
    config = _document(directory / "config.json") if (directory / "config.json").is_file() else {}
    stages = whole(config.get("pp_size")) or 1 + max(paths)
    if missing := sorted(set(range(min(stages, 1 << 20))) - set(paths)):
        raise RecordingError(f"{directory} lacks pp_rank_N.json of stage {numbered(missing)}: a pipeline of {stages}")
    actions = [each for stage, path in paths.items() for each in _actions(path, stage)]
    found = steps_of(str(directory), actions, wanted)
    notes = ["Times count from each stage's own start of the iteration: stages are taken to start together."]
    if (replicas := whole(config.get("dp_size")) or 1) > 1:
        notes.append(f"One of {replicas} replicas was dumped.")
    return understood(
        name=str(directory),
        source="Primus' pp_data",
        steps=found.steps,
        left_out=found.left_out,
        notes=[*notes, *found.notes],
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        with opened(path) as file:
            document = json.loads(file.read(MOST_NBYTES))
    except (ValueError, RecursionError, *DAMAGED) as error:
        raise RecordingError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise RecordingError(f"{path} holds no object")
    return document


def _actions(path: Path, stage: int) -> Iterator[RecordedAction]:
    splits = False
    for name, row in _document(path).items():
        number = whole(name)
        if number is None or not isinstance(row, dict):
            raise RecordingError(f"{path}: {name[:40]!r} is no iteration with its actions")
        splits = bool(row.get("wgrad_start"))
        for prefix, optype in (
            ("fwd", OpType.FORWARD),
            ("bwd", OpType.BACKWARD_INPUT if splits else OpType.BACKWARD),
            ("wgrad", OpType.BACKWARD_WEIGHT),
        ):
            yield from _row(path, stage, number, row, prefix, optype)


def _row(
    path: Path, stage: int, number: int, row: dict[str, Any], prefix: str, optype: OpType
) -> Iterator[RecordedAction]:
    lists = {part: row.get(f"{prefix}_{part}") or [] for part in ("start", "end", "chunk", "minibatch")}
    count = len(lists["start"]) if isinstance(lists["start"], list) else -1
    fits = all(isinstance(each, list) and len(each) in (0, count) for each in lists.values())
    if not fits or len(lists["end"]) != count:
        raise RecordingError(f"{path}, iteration {number}: {prefix}_start and {prefix}_end are no lists of one length")
    for index, (start, end) in enumerate(zip(lists["start"], lists["end"], strict=True)):
        start_ms, end_ms = seconds_of(start), seconds_of(end)
        if start_ms is None or end_ms is None or end_ms < start_ms:
            raise RecordingError(f"{path}, iteration {number}: {prefix} {index} lasts from {start!r} to {end!r}")
        chunk = whole(lists["chunk"][index]) if lists["chunk"] else 0
        micro_batch = whole(lists["minibatch"][index]) if lists["minibatch"] else None
        yield RecordedAction(
            Cell(0, stage), optype, number, chunk or 0, micro_batch, 1e-3 * start_ms, 1e-3 * (end_ms - start_ms)
        )


COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
_KNOWN = {optype.value: optype for optype in OpType}
_NUMBERS = ("dp_rank", "stage", "step", "seq_id")
_TIMES = ("start_ts", "duration")


def read_parquet(path: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """Read the steps of a Parquet trace. Raises RecordingError if it is none, or pyarrow is missing."""
    steps: dict[int, list[Operation]] = defaultdict(list)
    unread: dict[int, str] = {}
    others: Counter[str] = Counter()
    there: set[int] = set()
    for row, values in enumerate(zip(*_columns(path), strict=True)):
        named = dict(zip(COLUMNS, values, strict=True))
        step = named["step"]
        if step is None:
            raise RecordingError(
                f"{path}, row {row}: its step is no number: an op-level trace names the step of each row"
            )
        there.add(step)
        if step not in wanted:
            continue
        if named["optype"] not in _KNOWN:
            others[str(named["optype"])[:40]] += 1
            continue
        odd = next((name for name in (*_NUMBERS, *_TIMES) if named[name] is None), None)
        if odd is not None:
            unread.setdefault(step, f"step {step}: row {row} has no number in {odd}")
            continue
        steps[step].append(_operation(named))
    if not any(step in wanted for step in there):
        raise no_such_step(str(path), there)
    notes = [f"{count} rows of type {name!r} are left out." for name, count in others.items()]
    made, left_out = _steps(steps, unread)
    return understood(
        name=str(path),
        source="an op-level trace",
        steps=_from_stage_0(path, made),
        left_out=[*unread.values(), *left_out],
        notes=notes,
    )


def _operation(named: dict[str, Any]) -> Operation:
    return Operation(
        Cell(named["dp_rank"], named["stage"]),
        _KNOWN[named["optype"]],
        named["start_ts"],
        named["duration"],
        named["seq_id"],
        max(0, named["mc"] or 0),
        -1 if named["mb_id"] is None else named["mb_id"],
    )


def _steps(steps: dict[int, list[Operation]], unread: dict[int, str]) -> tuple[list[RecordedStep], list[str]]:
    made, left_out = [], []
    for step, operations in sorted(steps.items()):
        if step in unread:
            continue
        try:
            made.append(RecordedStep(number=step, operations=tuple(_in_order(step, operations))))
        except ReplayError as error:
            left_out.append(str(error))
    return made, left_out


def _in_order(step: int, operations: list[Operation]) -> Iterator[Operation]:
    """Yield the operations. Raises ReplayError if one occurs twice, or forwards or backwards are missing."""
    seen: set[tuple[Cell, OpType, int]] = set()
    optypes = {each.optype for each in operations}
    if OpType.FORWARD not in optypes or not optypes & {OpType.BACKWARD, OpType.BACKWARD_INPUT}:
        raise ReplayError(f"step {step} has no forwards or no backwards: it is no training step")
    named = {each.micro_batch for each in operations if each.optype.computes}
    if -1 in named and len(named) > 1:
        raise ReplayError(f"step {step}: some computation names its micro-batch (mb_id), some does not")
    for each in operations:
        key = (each.cell, each.optype, each.sequence)
        if key in seen:
            raise ReplayError(
                f"step {step}: {each} is there twice, as if two runs were in one file: name one run alone"
            )
        seen.add(key)
        # Where micro-batches are not named, an operation's number among its type is its micro-batch's.
        yield each._replace(micro_batch=each.sequence) if each.optype.computes and each.micro_batch < 0 else each


def _from_stage_0(path: Path, steps: list[RecordedStep]) -> list[RecordedStep]:
    stages = sorted({cell.stage for step in steps for cell in step.cells})
    if stages and (stages[0] or stages[-1] != len(stages) - 1):
        missing = sorted(set(range(stages[-1])) - set(stages))
        raise RecordingError(
            f"{path} has stages {numbered(stages)} of a pipeline; missing: {numbered(missing)}. A job can be replayed "
            "with all its stages alone"
        )
    return steps


def _columns(path: Path) -> list[list[Any]]:
    """Return the values of all columns; None for a value that should be a number and is not."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RecordingError(f"reading {path} needs pyarrow: pip install 'adaptra-megatron[traces]'") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RecordingError(f"{path} is no Parquet file: {error}") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise RecordingError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}: op-level traces have "
            f"{', '.join(COLUMNS)}"
        )
    found = []
    for name in COLUMNS:
        values = table.column(name).to_pylist()
        if name in _TIMES:
            values = [float(each) if _is_number(each) else None for each in values]
        elif name != "optype":
            values = [int(each) if _is_number(each) and each == int(each) else None for each in values]
        found.append(values)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 62


def read_recording(
    path: Path, wanted: Wanted = ALL_STEPS, *, asked: Asked | None = None, progress: Progress | None = None
) -> Recording:
    """Read the recording at `path`: a Parquet file, a run's directory, a Chrome trace, or a directory with one per
    rank.

    `asked`: the user's values for what a Chrome trace lacks. Raises RecordingError, TraceError or EventLogError for
    invalid input, OSError for a file that cannot be opened.
    """
    read: Callable[[], Recording]
    if path.is_dir() and any(path.glob(FILE_PATTERN)):
        read = partial(read_run_directory, path, wanted)
    elif path.is_dir() and stages_in(path):
        read = partial(read_primus, path, wanted)
    elif not path.is_dir() and head_of(path).startswith(PARQUET):
        read = partial(read_parquet, path, wanted)
    else:
        return read_chrome(path, wanted, asked, progress)
    if progress is None:
        return read()
    progress("reading traces", 0, 1)
    found = read()
    progress("reading traces", 1, 1)
    return found
