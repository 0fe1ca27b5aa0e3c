# SPDX-License-Identifier: Apache-2.0
"""Schedules as the CSV that torch.distributed.pipelining reads and writes (`compute_only` format).

One row per pipeline rank, one cell per action: `0F0,1F0,1I0,1W0,0B0` is virtual stage, kind, micro-batch. Torch calls
the virtual stage "stage index"; with its loop-style placement, which is Megatron's, it is `chunk * stages + stage`.
Torch leaves cells empty where a rank idles; the order of the others is all that counts, here as there.
"""

from __future__ import annotations

import csv
import re

from adaptra_megatron.schedule.actions import Action, Kind, Order, Schedule, placement, virtual_stage
from adaptra_megatron.schedule.errors import ScheduleError

_KINDS = {kind.value: kind for kind in Kind}
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


def schedule_to_csv(schedule: Schedule) -> str:
    """The schedule as CSV text that `PipelineScheduleMulti._load_csv` of torch 2.13 reads."""
    stages = schedule.stages
    # A Kind is its letter: adding it is several times as fast as formatting it, and large plans are written per switch.
    rows = (
        ",".join(
            [str(virtual_stage(stage, chunk, stages)) + kind + str(number) for stage, kind, chunk, number in order]
        )
        for order in schedule.orders
    )
    return "".join(f"{row}\n" for row in rows)


def schedule_from_csv(text: str, *, chunks: int | None = None) -> Schedule:
    """The schedule in CSV text, as `_dump_csv(format="compute_only")` of torch 2.13 writes it.

    Stages are the rows; blank lines at the end are none. `chunks` None infers the chunks from the largest virtual
    stage, micro-batches are inferred from the largest one. Raises ScheduleError, naming row and column (from 1), for a
    cell that is no F, B, I or W, that stands in the row of a rank on which Megatron does not place its virtual stage,
    or that names a chunk beyond `chunks`. Whether the schedule can run is for `checks.check_schedule` to say.
    """
    if chunks is not None and chunks < 1:
        raise ScheduleError(f"chunks must be at least 1, got {chunks}")
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise ScheduleError(f"not a CSV: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    orders = tuple(_order(rank, row, len(rows), chunks) for rank, row in enumerate(rows))
    actions = [action for order in orders for action in order]
    if not actions:
        raise ScheduleError("the CSV holds no action; a row per rank with cells like 0F0 is expected")
    return Schedule(
        stages=len(rows),
        chunks=chunks if chunks is not None else 1 + max(action.chunk for action in actions),
        micro_batches=1 + max(action.micro_batch for action in actions),
        orders=orders,
    )


def _order(rank: int, row: list[str], stages: int, chunks: int | None) -> Order:
    actions = []
    for column, cell in enumerate(row):
        if cell := cell.strip():
            try:
                actions.append(_action(cell, rank, stages, len(row) if chunks is None else chunks))
            except ScheduleError as error:
                raise ScheduleError(f"row {rank + 1}, column {column + 1}: {error}", stage=rank) from None
    return tuple(actions)


def _action(cell: str, rank: int, stages: int, chunks: int) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{cell!r} is no action: virtual stage, one of F, B, I, W, and micro-batch are expected, as in 0F0 "
            "(torch's compute_only format, without its communication and overlapped actions)"
        )
    virtual, micro_batch = int(match[1]), int(match[3])
    stage, chunk = placement(virtual, stages)
    if stage != rank:
        raise ScheduleError(
            f"{cell!r} stands in rank {rank}'s row, but with {stages} rows Megatron places virtual stage {virtual} on "
            f"rank {stage} (virtual stage modulo ranks): move it there"
        )
    if chunk >= chunks:
        raise ScheduleError(f"{cell!r} belongs to chunk {chunk} of rank {rank}, which has at most {chunks} chunks")
    return Action(stage, _KINDS[match[2]], chunk, micro_batch)
