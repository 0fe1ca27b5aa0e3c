# SPDX-License-Identifier: Apache-2.0
"""Primus' pp_data: what `dump_pp_data` leaves, a `pp_rank_N.json` for each stage, in milliseconds from its own start.

A file has an entry for each iteration: `fwd_start`, `fwd_end`, `bwd_start`, `bwd_end` and, of split backwards,
`wgrad_start`, `wgrad_end`, one number for each action in the order in which they ran; `fwd_chunk` and `fwd_minibatch`
say more where they are filled. The rank of stage 0 is the first of a pipeline; of several replicas one was dumped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.tools.recordings.contents import DAMAGED, MOST_NBYTES, opened
from adaptra_megatron.tools.recordings.naming import seconds_of, whole
from adaptra_megatron.tools.recordings.recorded_steps import RecordedAction, steps_of
from adaptra_megatron.tools.recordings.recording import (
    ALL_STEPS,
    Recording,
    RecordingError,
    Wanted,
    numbered,
    understood,
)
from adaptra_megatron.tools.replay.operations import OpType

_FILE = re.compile(r"pp_rank_(\d{1,6})\.json(?:\.gz)?")


def stages_in(directory: Path) -> dict[int, Path]:
    """Its files, by stage; none for other directories."""
    found = {int(match[1]): each for each in directory.iterdir() if (match := _FILE.fullmatch(each.name)) is not None}
    return dict(sorted(found.items()))


def read_primus(directory: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """The iterations of all stages. Raises RecordingError for files that are none of these, and missing stages."""
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
