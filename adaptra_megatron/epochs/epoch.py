# SPDX-License-Identifier: Apache-2.0
"""Epochs of a job that outlives its ranks: the sets of cells that have lived one after another."""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.epochs.errors import UnrecoverableError
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


def live_ranks(layout: JobLayout, membership: Membership) -> frozenset[int]:
    """Ranks of cells that have lost none."""
    dead = _dead_cells(layout, membership)
    return frozenset(rank for rank, worker in layout.workers.items() if worker.cell not in dead)


def epoch_of(layout: JobLayout, control: ControlStore, membership: Membership) -> Epoch:
    """The epoch of those that live in `membership`.

    Raises UnrecoverableError where a stage has no live cell, or this rank's cell has lost another rank.
    """
    dead = _dead_cells(layout, membership)
    stages = {cell.stage for cell in layout.cells}
    lost = [stage for stage in sorted(stages) if all(cell in dead for cell in layout.cells_of(stage))]
    whys = "; ".join(f"{layout.name(each.rank)}: {each.why}" for each in membership.left)
    if lost:
        raise UnrecoverableError(
            f"all {layout.replicas} cells of stage {', '.join(map(str, lost))} are dead, and no other holds their "
            f"parameters ({whys}): {RESTART}"
        )
    if layout.cell in dead:
        raise UnrecoverableError(
            f"{layout.name(layout.rank)} has no part in the job any more, for its cell has lost a rank ({whys})"
        )
    # The first with these live cells: lanes of a cell die one after another, and ranks look at different times.
    first = dict.fromkeys(dead, membership.epoch)
    for each in membership.left:
        cell = layout.workers[each.rank].cell
        first[cell] = min(first[cell], each.epoch)
    number = max(first.values())
    return Epoch(number, live_ranks(layout, membership), dead, control.in_epoch(number))


def _dead_cells(layout: JobLayout, membership: Membership) -> frozenset[Cell]:
    return frozenset(layout.workers[each.rank].cell for each in membership.left)
