# SPDX-License-Identifier: Apache-2.0
"""Op-level traces in Parquet, as published with "Understanding Stragglers in Large Model Training" (OSDI '25).

A row is an operation: `dp_rank`, `stage`, `step`, `optype` (a name of `OpType`), `start_ts` and `duration` in seconds,
`seq_id` (order within type and step), `mc` (model chunk) and `mb_id` (micro-batch, of computation alone). Needs pyarrow
(`pip install 'adaptra-megatron[traces]'`), imported when a trace is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.replay.operations import Operation, OpType, RecordedStep
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, Recording, RecordingError, Wanted

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")


def read_parquet(path: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """The steps of a trace. Raises RecordingError for what is no such trace, and where pyarrow is missing."""
    columns = _columns(path)
    steps: dict[int, list[Operation]] = {}
    known = {optype.value: optype for optype in OpType}
    for replica, stage, step, name, start_s, seconds, sequence, chunk, micro_batch in zip(*columns, strict=True):
        if step not in wanted:
            continue
        if name not in known:
            raise RecordingError(f"{path} has the operation type {name!r}; known are {', '.join(known)}")
        operation = Operation(Cell(replica, stage), known[name], start_s, seconds, sequence, max(0, chunk), micro_batch)
        steps.setdefault(step, []).append(operation)
    return Recording(
        name=str(path),
        source="an op-level trace",
        steps=tuple(RecordedStep(number=step, operations=tuple(steps[step])) for step in sorted(steps)),
    )


def _columns(path: Path) -> list[list[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RecordingError(f"reading {path} needs pyarrow: pip install 'adaptra-megatron[traces]'") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise RecordingError(f"{path} is no Parquet file: {error}") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise RecordingError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}: op-level traces have "
            f"{', '.join(COLUMNS)}"
        )
    return [table.column(name).to_pylist() for name in COLUMNS]
