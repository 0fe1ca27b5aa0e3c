# SPDX-License-Identifier: Apache-2.0
"""Generations of a job: the sets of live cells that train one after another. Pure: no store, thread or clock.

Failures begin a generation, and so do admissions of rejoining ranks. Ranks learn of failures at different times and
must meet before they can agree on anything. So each rank derives the generation's identity from its own membership.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.elastic.failure_errors import JobLostError, UnrecoverableError

if TYPE_CHECKING:
    from adaptra_megatron.common.layout import JobLayout
    from adaptra_megatron.common.membership import Arrival, Membership

RESTART = "restart from the last checkpoint"


class GenerationId(NamedTuple):
    """Identity of one generation, unique within the job. Attempts, keys in the store and groups are named by it.

    An admission is identified by the number of the call before which it happens, which is committed once. A failure has
    no such number. Later generations compare greater.
    """

    membership: int
    """Membership epoch of the first failure that made these cells dead, or of the admission."""
    admission: int = 0
    """1 + number of the call before which ranks were admitted; 0: failures made this generation."""

    def __str__(self) -> str:
        return f"{self.membership}+{self.admission}" if self.admission else str(self.membership)


FIRST = GenerationId(0)


@dataclass(frozen=True)
class Generation:
    """A set of live cells, with the admissions that led to it."""

    id: GenerationId
    live: frozenset[int]
    """Ranks of all live cells. A cell is live if all of its ranks are."""
    dead_cells: frozenset[Cell]
    admitted: Mapping[int, int] = field(default_factory=dict)
    """Membership epoch of the arrival of each failed rank that has rejoined."""
    least: int = 0
    """Membership epoch of the last admission."""
    refused: Mapping[int, int] = field(default_factory=dict)
    """Arrivals, as in `admitted`, that were too late for their admission: their processes cannot be admitted
    any more.
    """


def first_generation(layout: JobLayout) -> Generation:
    """Return the generation that a job begins with: all ranks."""
    return Generation(FIRST, frozenset(layout.workers), frozenset())


def dead_cells(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[Cell]:
    """Return the cells with failed ranks that have not been replaced. `admitted`: see `Generation`."""
    return frozenset(
        layout.workers[each.rank].cell for each in membership.left if each.epoch > admitted.get(each.rank, 0)
    )


def live_ranks(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks of all cells that are not dead. `admitted`: see `Generation`."""
    dead = dead_cells(layout, membership, admitted)
    return frozenset(rank for rank, worker in layout.workers.items() if worker.cell not in dead)


def after_failures(layout: JobLayout, membership: Membership, before: Generation) -> Generation:
    """Return the generation of the ranks that are live in `membership`, which follows `before`.

    It is the same for all memberships with these dead cells. Raises JobLostError if a stage has no live cell,
    UnrecoverableError if another rank of this rank's cell has failed.
    """
    refuse_lost_stages(layout, membership, before.admitted)
    dead = dead_cells(layout, membership, before.admitted)
    if layout.cell in dead:
        raise UnrecoverableError(
            f"{layout.name(layout.rank)} cannot take part in the job any more: its cell has lost a rank "
            f"({_whys(layout, membership)})"
        )
    # Lanes of a cell fail one after another, and ranks look at different times: the first failure of each cell counts.
    first = dict.fromkeys(dead, membership.epoch)
    for each in membership.left:
        if each.epoch > before.admitted.get(each.rank, 0):
            cell = layout.workers[each.rank].cell
            first[cell] = min(first[cell], each.epoch)
    identity = GenerationId(max(before.least, *first.values()))
    live = live_ranks(layout, membership, before.admitted)
    return Generation(identity, live, dead, before.admitted, before.least, before.refused)


def rejoining(layout: JobLayout, membership: Membership, before: Generation) -> dict[int, Arrival]:
    """Return the arrivals of ranks that are ready to rejoin `before`, of cells that are ready as a whole."""
    live = set(membership.live)
    ready = {
        each.rank: each
        for each in membership.arrived
        if each.rank in live and each.epoch > max(before.admitted.get(each.rank, 0), before.refused.get(each.rank, 0))
    }
    whole = (layout.cells[cell] for cell in before.dead_cells if ready.keys() >= set(layout.cells[cell]))
    return {rank: ready[rank] for ranks in whole for rank in ranks}


def can_admit(layout: JobLayout, membership: Membership, before: Generation) -> bool:
    """Return whether ranks can be admitted to `before` now: all ranks of a cell are ready, and no rank of `before` has
    failed.
    """
    # First, for what follows looks at every rank of the job, and this is asked at every commit.
    if all(each.epoch <= before.admitted.get(each.rank, 0) for each in membership.arrived):
        return False
    if live_ranks(layout, membership, before.admitted) != before.live:
        return False
    return bool(rejoining(layout, membership, before))


def with_rejoining(layout: JobLayout, membership: Membership, before: Generation, call: int) -> Generation:
    """Return the generation of `before` and the ranks that are ready in `membership`, which begins with call number
    `call`.
    """
    arrived = {rank: each.epoch for rank, each in rejoining(layout, membership, before).items()}
    admitted = {**before.admitted, **arrived}
    identity = GenerationId(membership.epoch, call + 1)
    dead, live = dead_cells(layout, membership, admitted), live_ranks(layout, membership, admitted)
    return Generation(identity, live, dead, admitted, membership.epoch, before.refused)


def refuse_lost_stages(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> None:
    """Raise JobLostError if a stage has no live cell. `admitted`: see `Generation`."""
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
