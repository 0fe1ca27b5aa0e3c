# SPDX-License-Identifier: Apache-2.0
"""Generations of a job: the sets of live cells that train one after another. Pure: no store, thread or clock.

Failures make a generation, and admissions of ranks that rejoin do. Ranks learn of failures at different times and have
to meet before they can agree on anything, so its identity follows from what each sees by itself.
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
    """Names one generation of a job for good, and so all that is keyed by it: attempts, keys in the store, groups.

    No two generations share one: an admission has the number of the call that it comes before, which is committed once,
    and a failure has none. Later generations compare greater.
    """

    membership: int
    """Epoch of the launcher's membership: of the first failure that makes these cells dead, or of the admission."""
    admission: int = 0
    """1 + number of the call before which ranks were admitted; 0: failures made this generation."""

    def __str__(self) -> str:
        return f"{self.membership}+{self.admission}" if self.admission else str(self.membership)


FIRST = GenerationId(0)


@dataclass(frozen=True)
class Generation:
    """A set of live cells."""

    id: GenerationId
    live: frozenset[int]
    """Ranks of cells all of whose ranks live."""
    dead_cells: frozenset[Cell]
    admitted: Mapping[int, int] = field(default_factory=dict)
    """Ranks that had failed and take part again, and the membership epoch of the arrival of each."""
    least: int = 0
    """Membership epoch of the last admission."""
    refused: Mapping[int, int] = field(default_factory=dict)
    """Arrivals, as in `admitted`, that came too late to their admission: their processes are not admitted any more."""


def first_generation(layout: JobLayout) -> Generation:
    """Return the one that all ranks begin with."""
    return Generation(FIRST, frozenset(layout.workers), frozenset())


def dead_cells(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[Cell]:
    """Return cells that have lost ranks in whose places no others have been admitted."""
    return frozenset(
        layout.workers[each.rank].cell for each in membership.left if each.epoch > admitted.get(each.rank, 0)
    )


def live_ranks(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> frozenset[int]:
    """Return ranks of cells that have lost none, or have admitted others in their places. `admitted`: see
    `Generation`."""
    dead = dead_cells(layout, membership, admitted)
    return frozenset(rank for rank, worker in layout.workers.items() if worker.cell not in dead)


def after_failures(layout: JobLayout, membership: Membership, before: Generation) -> Generation:
    """Return the generation of those that live in `membership`, which follows `before`. The same for all memberships
    with these dead cells.

    Raises JobLostError where a stage has no live cell, UnrecoverableError where this rank's cell has lost another rank.
    """
    refuse_lost_stages(layout, membership, before.admitted)
    dead = dead_cells(layout, membership, before.admitted)
    if layout.cell in dead:
        raise UnrecoverableError(
            f"{layout.name(layout.rank)} has no part in the job any more, for its cell has lost a rank "
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
    """Return ranks that stand ready to take part and do not in `before`, of cells all of whose ranks do."""
    live = set(membership.live)
    ready = {
        each.rank: each
        for each in membership.arrived
        if each.rank in live and each.epoch > max(before.admitted.get(each.rank, 0), before.refused.get(each.rank, 0))
    }
    whole = (layout.cells[cell] for cell in before.dead_cells if ready.keys() >= set(layout.cells[cell]))
    return {rank: ready[rank] for ranks in whole for rank in ranks}


def can_admit(layout: JobLayout, membership: Membership, before: Generation) -> bool:
    """Return whether ranks can be admitted to `before` now: some stand ready, and none of it has failed."""
    # First, for what follows looks at every rank of the job, and this is asked at every commit.
    if all(each.epoch <= before.admitted.get(each.rank, 0) for each in membership.arrived):
        return False
    if live_ranks(layout, membership, before.admitted) != before.live:
        return False
    return bool(rejoining(layout, membership, before))


def with_rejoining(layout: JobLayout, membership: Membership, before: Generation, call: int) -> Generation:
    """Return the generation in which those of `before` and those that stand ready in `membership` take part, from call
    number `call` on."""
    arrived = {rank: each.epoch for rank, each in rejoining(layout, membership, before).items()}
    admitted = {**before.admitted, **arrived}
    identity = GenerationId(membership.epoch, call + 1)
    dead, live = dead_cells(layout, membership, admitted), live_ranks(layout, membership, admitted)
    return Generation(identity, live, dead, admitted, membership.epoch, before.refused)


def refuse_lost_stages(layout: JobLayout, membership: Membership, admitted: Mapping[int, int]) -> None:
    """Raise JobLostError where a stage has no live cell. `admitted`: see `Generation`."""
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
