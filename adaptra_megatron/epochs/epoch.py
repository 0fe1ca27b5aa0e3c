# SPDX-License-Identifier: Apache-2.0
"""Epochs of a job that outlives its ranks: the sets of cells that have lived one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptra_megatron.epochs.errors import JobLostError, UnrecoverableError
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Membership
from adaptra_megatron.schedule.routing.costs import Cell

RESTART = "restart from the last checkpoint"


@dataclass(frozen=True)
class Epoch:
    """A set of live cells."""

    number: int
    """The launcher's, of the membership that it follows from."""
    live: frozenset[int]
    """Ranks of cells all of whose ranks live."""
    dead_cells: frozenset[Cell]
    control: ControlStore
    """For keys of this epoch alone."""
    admitted: Mapping[int, int] = field(default_factory=dict)
    """Ranks that had left and take part again, and the epoch of the arrival of each."""
    least: int = 0
    """Number of the epoch in which the last of them were admitted."""


def live_ranks(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[int]:
    """Ranks of cells that have lost none, or have admitted others in their places. `admitted`: see `Epoch`."""
    dead = dead_cells(layout, membership, admitted)
    return frozenset(rank for rank, worker in layout.workers.items() if worker.cell not in dead)


def epoch_of(layout: JobLayout, control: ControlStore, membership: Membership, before: Epoch) -> Epoch:
    """The epoch of those that live in `membership`, which follows `before`.

    Raises JobLostError where a stage has no live cell, UnrecoverableError where this rank's cell has lost another rank.
    """
    refuse_lost_stages(layout, membership, before.admitted)
    dead = dead_cells(layout, membership, before.admitted)
    if layout.cell in dead:
        raise UnrecoverableError(
            f"{layout.name(layout.rank)} has no part in the job any more, for its cell has lost a rank "
            f"({_whys(layout, membership)})"
        )
    # The first with these live cells: lanes of a cell die one after another, and ranks look at different times.
    first = dict.fromkeys(dead, membership.epoch)
    for each in membership.left:
        if each.epoch > before.admitted.get(each.rank, 0):
            cell = layout.workers[each.rank].cell
            first[cell] = min(first[cell], each.epoch)
    number = max(before.least, *first.values())
    live = live_ranks(layout, membership, before.admitted)
    return Epoch(number, live, dead, control.in_epoch(number), before.admitted, before.least)


def refuse_lost_stages(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> None:
    """Raise JobLostError where a stage has no live cell. `admitted`: see `Epoch`."""
    dead = dead_cells(layout, membership, admitted)
    stages = {cell.stage for cell in layout.cells}
    lost = [stage for stage in sorted(stages) if all(cell in dead for cell in layout.cells_of(stage))]
    if lost:
        raise JobLostError(
            f"all {layout.replicas} cells of stage {', '.join(map(str, lost))} are dead, and no other holds their "
            f"parameters ({_whys(layout, membership)}): {RESTART}"
        )


def _whys(layout: JobLayout, membership: Membership) -> str:
    return "; ".join(f"{layout.name(each.rank)}: {each.why}" for each in membership.left)


def dead_cells(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[Cell]:
    """Cells that have lost ranks in whose places no others have been admitted."""
    return frozenset(
        layout.workers[each.rank].cell for each in membership.left if each.epoch > admitted.get(each.rank, 0)
    )
