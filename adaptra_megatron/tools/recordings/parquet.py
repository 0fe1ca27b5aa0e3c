# SPDX-License-Identifier: Apache-2.0
"""Op-level traces in Parquet, as published with "Understanding Stragglers in Large Model Training" (OSDI '25).

A row is an operation: `dp_rank`, `stage`, `step`, `optype` (a name of `OpType`), `start_ts` and `duration` in seconds,
`seq_id` (order within type and step), `mc` (model chunk) and `mb_id` (micro-batch, of computation alone). Needs pyarrow
(`pip install 'adaptra-megatron[traces]'`), imported when a trace is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.tools.recordings.recording import (
    ALL_STEPS,
    Recording,
    RecordingError,
    Wanted,
    no_such_step,
    numbered,
    understood,
)
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, ReplayError

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
_KNOWN = {optype.value: optype for optype in OpType}
_NUMBERS = ("dp_rank", "stage", "step", "seq_id")
_TIMES = ("start_ts", "duration")


def read_parquet(path: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """The steps of a trace. Raises RecordingError for what is no such trace, and where pyarrow is missing."""
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
    """The operations. Raises ReplayError for one that is there twice, and for a step without backwards or forwards."""
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
    """Values of all columns; None for what is no number where one has to be."""
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
