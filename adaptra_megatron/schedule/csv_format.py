# SPDX-License-Identifier: Apache-2.0
"""Read and write schedules as CSV of torch.distributed.pipelining: `compute_only`, which we write, and `compute_comms`.

There is one row per pipeline rank and one cell per action: `0F0,1F0,1I0,1W0,0B0` is virtual stage, kind, micro-batch.
Torch calls the virtual stage "stage index". A virtual stage belongs to the rank in whose row its actions are: torch's
"loop" style is Megatron's placement, its "v" style is `ir.v_shape`.

Torch leaves cells empty where a rank idles; only the order of the other cells counts. Sends and receives (`0SEND_F0`)
follow from that order and are left out, as are the actions of FSDP (`0UNSHARD`). Before torch 2.6 an input gradient was
called B, as whole backwards are today. So a B that has a W is an input gradient, and `BW` is a whole backward.
An overlapped action, `(0F2;3B0)OVERLAP_F_B`, is a combined one.
"""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

from adaptra_megatron.schedule.ir import Action, Kind, Placement, Schedule, ScheduleError

_KINDS = {kind.value: kind for kind in Kind}
_CELL = re.compile(r"(\d{1,9})(F|BW|B|I|W)(\d{1,9})", re.ASCII)
_NO_COMPUTATION = re.compile(r"\d{1,9}(?:(?:SEND|RECV)_[FB]\d{1,9}|(?:UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9})", re.ASCII)
_OVERLAPPED = re.compile(r"\((\w{3,24});(\w{3,24})\)OVERLAP_F_B", re.ASCII)


def schedule_to_csv(schedule: Schedule) -> str:
    """Return the schedule as CSV text that `PipelineScheduleMulti._load_csv` of torch 2.13 reads."""
    placement, chunks = schedule.placement, range(schedule.chunks)
    # A Kind is its letter: adding it is several times as fast as formatting it, and large plans are written per switch.
    rows = []
    for stage, order in enumerate(schedule.orders):
        virtual_stages = [str(placement.virtual_stage(stage, chunk)) for chunk in chunks]
        cells, before = [], ""
        for _, kind, chunk, number, combined in order:
            cell = virtual_stages[chunk] + kind + str(number)
            cells.append(f"({before};{cell})OVERLAP_F_B" if before else cell)
            before = ""
            if combined:
                before = cells.pop()
        rows.append(",".join(cells))
    return "".join(f"{row}\n" for row in rows)


class _Cell(NamedTuple):
    """An action of the text; rows and columns count from 0."""

    row: int
    column: int
    text: str
    virtual_stage: int
    kind: Kind
    micro_batch: int
    whole: bool = False
    """True for BW: a backward without a weight gradient of its own."""
    combined: bool = False
    """True for a forward that the next cell overlaps."""

    def error(self, what: str) -> ScheduleError:
        return ScheduleError(f"row {self.row + 1}, column {self.column + 1}: {self.text!r} {what}", stage=self.row)


def schedule_from_csv(text: str, *, chunks: int | None = None) -> Schedule:
    """Parse CSV text as torch's `_dump_csv` writes it; return the schedule.

    Each row is a stage; blank lines at the end are ignored. The placement is Megatron's if it agrees with the rows,
    else it is taken from the rows. `chunks` None infers the chunks from the largest virtual stage; the number of
    micro-batches is inferred from the largest one. Raises ScheduleError, naming row and column (from 1), for a cell
    that is no F, B, I or W, that names a chunk beyond `chunks`, or whose virtual stage belongs to the row of another
    rank, or that overlaps anything but a forward and a backward. Does not check whether the schedule can run: see
    `schedule_checks.check_schedule`.
    """
    if chunks is not None and chunks < 1:
        raise ScheduleError(f"chunks must be at least 1, got {chunks}")
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise ScheduleError(f"not a CSV: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    cells = [
        [one for column, cell in enumerate(row) if (text := cell.strip()) for one in _cells(number, column, text)]
        for number, row in enumerate(rows)
    ]
    cells = [_halved(row) for row in cells]
    actions = [cell for row in cells for cell in row]
    if not actions:
        raise ScheduleError("the CSV holds no action; a row per rank with cells like 0F0 is expected")
    stages = len(rows)
    misplaced = next((cell for cell in actions if cell.virtual_stage % stages != cell.row), None)
    placement = None if misplaced is None else _placement(actions, stages, chunks, misplaced)
    orders = tuple(
        tuple(_action(cell, placement, stages, chunks or len(rows[cell.row])) for cell in row) for row in cells
    )
    if chunks is None:
        chunks = 1 + max(action.chunk for order in orders for action in order)
    return Schedule(
        stages=stages,
        chunks=chunks,
        micro_batches=1 + max(cell.micro_batch for cell in actions),
        orders=orders,
        custom_placement=placement,
    )


def _cells(row: int, column: int, text: str) -> list[_Cell]:
    """Return the actions of a cell: two if they overlap, none if it is empty."""
    overlapped = _OVERLAPPED.fullmatch(text)
    if overlapped is not None:
        forward, backward = (_cell(row, column, part) for part in overlapped.groups())
        if forward.kind is not Kind.FORWARD or not backward.kind.sends_gradient:
            raise forward._replace(text=text).error("overlaps other actions than a forward and a backward, F;B or F;I")
        return [forward._replace(combined=True), backward]
    return [] if _NO_COMPUTATION.fullmatch(text) else [_cell(row, column, text)]


def _halved(cells: list[_Cell]) -> list[_Cell]:
    """Replace each B that has a W of its own by I. `cells`: of one rank."""
    apart = {(cell.virtual_stage, cell.micro_batch) for cell in cells if cell.kind is Kind.BACKWARD_WEIGHT}
    return [
        cell._replace(kind=Kind.BACKWARD_INPUT)
        if cell.kind is Kind.BACKWARD and not cell.whole and (cell.virtual_stage, cell.micro_batch) in apart
        else cell
        for cell in cells
    ]


def _cell(row: int, column: int, text: str) -> _Cell:
    match = _CELL.fullmatch(text)
    if match is None:
        raise _Cell(row, column, text, 0, Kind.FORWARD, 0).error(
            "is no action: virtual stage, one of F, B, I, W, and micro-batch are expected, as in 0F0 "
            "(torch's own formats, with or without communication)"
        )
    return _Cell(row, column, text, int(match[1]), _KINDS[match[2][0]], int(match[3]), match[2] == "BW")


def _placement(actions: list[_Cell], stages: int, chunks: int | None, misplaced: _Cell) -> Placement:
    """Return the placement that the rows give. Raises ScheduleError at `misplaced` if it is invalid."""
    virtual_stage = misplaced.virtual_stage
    rule = (
        f"is in rank {misplaced.row}'s row, but with {stages} rows Megatron places virtual stage {virtual_stage} "
        f"on rank {virtual_stage % stages} (virtual stage modulo ranks): move it there. Another placement has each "
        "virtual stage in one row, all up to the largest, and equally many in each row"
    )
    row_of: dict[int, int] = {}
    for cell in actions:
        if row_of.setdefault(cell.virtual_stage, cell.row) != cell.row:
            raise misplaced.error(f"{rule}; virtual stage {cell.virtual_stage} is in two")
    missing = next(number for number in range(len(row_of) + 1) if number not in row_of)
    if missing < len(row_of):
        raise misplaced.error(f"{rule}; virtual stage {missing} is in none")
    try:
        placement = Placement(tuple(row_of[virtual] for virtual in range(len(row_of))))
    except ScheduleError as error:
        raise misplaced.error(f"{rule}; here, {error}") from None
    if chunks not in (None, placement.chunks):
        raise misplaced.error(f"{rule}; here, {placement.chunks}, and {chunks} chunks per rank are expected")
    return placement


def _action(cell: _Cell, placement: Placement | None, stages: int, chunks: int) -> Action:
    if placement is not None:
        chunk = placement.places[cell.virtual_stage].chunk
        return Action(cell.row, cell.kind, chunk, cell.micro_batch, cell.combined)
    chunk = cell.virtual_stage // stages
    if chunk >= chunks:
        raise cell.error(f"belongs to chunk {chunk} of rank {cell.row}, which has at most {chunks} chunks")
    return Action(cell.row, cell.kind, chunk, cell.micro_batch, cell.combined)
