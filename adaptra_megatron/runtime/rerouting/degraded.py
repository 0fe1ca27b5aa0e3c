# SPDX-License-Identifier: Apache-2.0
"""What each cell runs while others are dead: their micro-batches are spread over the live cells of their stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.control.decisions import Routing
from adaptra_megatron.control.routes.cell_order import CellAction, CellOrder, cell_orders, moved_by
from adaptra_megatron.epochs.awaiting import said_by_one
from adaptra_megatron.epochs.epoch import Epoch
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.log import logger_of
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.planner import plan_routed

logger = logger_of(__name__)


class DegradedRoutes:
    """One rank's, for one epoch. The lowest live rank plans training; evaluation follows from the dead cells alone."""

    def __init__(self, layout: JobLayout, epoch: Epoch, timeout_s: float, check: Callable[[], None]) -> None:
        """`check`: raises once the epoch has ended, which is looked at in every wait."""
        self._layout, self._epoch, self._timeout_s, self._check = layout, epoch, timeout_s, check
        self.planned: Routing | None = None
        """The latest routes of training, on the rank that has planned them."""
        self._orders: dict[tuple[int, bool], CellOrder] = {}

    def order(self, costs: Costs, *, split: bool, forward_only: bool) -> CellOrder:
        """What this rank's cell runs. `costs`: of a pipeline, as this rank has them; those of the lowest live rank
        count. Raises RuntimeError when that does not say within the timeout."""
        key = costs.micro_batches, forward_only
        if key not in self._orders:
            if forward_only:
                self._orders[key] = evaluation_order(self._layout, self._epoch.dead_cells, costs.micro_batches)
            else:
                self._orders[key] = CellOrder.unpacked(self._planned(costs, split=split)[str(self._layout.cell)])
        return self._orders[key]

    def _planned(self, costs: Costs, *, split: bool) -> Mapping[str, str]:
        with self._epoch.control.lent("degraded", self._timeout_s) as store:
            return self._planned_by_one(store, costs, split=split)

    def _planned_by_one(self, store: SealedStore, costs: Costs, *, split: bool) -> Mapping[str, str]:
        mine = None
        if self._layout.rank == min(self._epoch.live):
            mine = json.dumps(self._plan(costs, split=split)).encode()
        try:
            found = said_by_one(store, f"orders/{costs.micro_batches}", mine, self._timeout_s, self._check)
        except TimeoutError as cause:
            raise RuntimeError(
                f"{self._layout.name(min(self._epoch.live))} has not planned for the live cells within "
                f"{self._timeout_s:g} s (--adaptra-timeout-s); look at its log"
            ) from cause
        orders: Mapping[str, str] = json.loads(found)
        return orders

    def _plan(self, costs: Costs, *, split: bool) -> Mapping[str, str]:
        dead = self._epoch.dead_cells
        costs = replace(costs, backward_s=None)
        plan = plan_routed(RoutedCosts(replicas=(costs,) * self._layout.replicas, dead=dead), split=split)
        if names := ", ".join(f"stage {cell.stage} of replica {cell.replica}" for cell in sorted(dead)):
            text = "%d micro-batches a replica: those of %s are computed by live replicas"
            logger.info(text, costs.micro_batches, names)
        orders = cell_orders(plan.simulation, costs)
        self.planned = Routing(1, costs.micro_batches, moved_by(plan.routing), orders)
        return orders


def evaluation_order(layout: JobLayout, dead: frozenset[Cell], micro_batches: int) -> CellOrder:
    """Forwards alone, by number and replica at every cell: one order of all, so that no two cells wait for each other.

    Those of a dead cell go round its live peers.
    """

    def host(replica: int, stage: int, number: int) -> int:
        if Cell(replica, stage) not in dead:
            return replica
        peers = [cell.replica for cell in layout.cells_of(stage) if cell not in dead]
        return peers[number % len(peers)]

    own, last = layout.cell, max(cell.stage for cell in layout.cells)
    mine = [
        (number, replica)
        for number in range(micro_batches)
        for replica in range(layout.replicas)
        if host(replica, own.stage, number) == own.replica
    ]
    actions = tuple(
        CellAction(
            Kind.FORWARD.value,
            0,
            replica,
            number,
            host(replica, own.stage - 1, number) if own.stage else None,
            host(replica, own.stage + 1, number) if own.stage < last else None,
            (place + 1) * bool(own.stage),
        )
        for place, (number, replica) in enumerate(mine)
    )
    return CellOrder(actions, tuple(range(len(actions))) if own.stage else (), None, 0.0)
