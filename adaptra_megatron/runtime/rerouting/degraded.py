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
from adaptra_megatron.epochs.errors import LateRankError
from adaptra_megatron.epochs.generation import Generation
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.log import logger_of
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.routing.costs import Cell, RoutedCosts
from adaptra_megatron.schedule.routing.interleaved import dispatch_interleaved, routing_around
from adaptra_megatron.schedule.routing.planner import plan_routed
from adaptra_megatron.schedule.routing.plans import RoutedAction, RoutedSchedule

logger = logger_of(__name__)


class DegradedRoutes:
    """Routes of one rank in a generation. The lowest live rank plans training; evaluation follows from dead cells."""

    def __init__(
        self,
        layout: JobLayout,
        generation: Generation,
        control: ControlStore,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """`check`: raises once the generation has ended, which is looked at in every wait."""
        self._layout, self._generation, self._control = layout, generation, control
        self._timeout_s, self._check = timeout_s, check
        self.planned: Routing | None = None
        """The latest routes of training, on the rank that has planned them."""
        self._orders: dict[tuple[int, bool], CellOrder] = {}

    def order(self, costs: Costs, *, split: bool, forward_only: bool) -> CellOrder:
        """What this rank's cell runs. `costs`: of a pipeline, as this rank has them; those of the lowest live rank
        count. Raises LateRankError when that does not say within the timeout."""
        key = costs.micro_batches, forward_only
        if key not in self._orders:
            if forward_only:
                count, chunks = costs.micro_batches, costs.chunks
                self._orders[key] = evaluation_order(self._layout, self._generation.dead_cells, count, chunks)
            else:
                self._orders[key] = CellOrder.unpacked(self._planned(costs, split=split)[str(self._layout.cell)])
        return self._orders[key]

    def _planned(self, costs: Costs, *, split: bool) -> Mapping[str, str]:
        with self._control.lent("degraded", self._timeout_s) as store:
            return self._planned_by_one(store, costs, split=split)

    def _planned_by_one(self, store: SealedStore, costs: Costs, *, split: bool) -> Mapping[str, str]:
        mine = None
        if self._layout.rank == min(self._generation.live):
            mine = json.dumps(self._plan(costs, split=split)).encode()
        try:
            found = said_by_one(store, f"orders/{costs.micro_batches}", mine, self._timeout_s, self._check)
        except TimeoutError as cause:
            raise LateRankError(
                f"{self._layout.name(min(self._generation.live))} has not planned for the live cells within "
                f"{self._timeout_s:g} s (--adaptra-timeout-s); look at its log"
            ) from cause
        orders: Mapping[str, str] = json.loads(found)
        return orders

    def _plan(self, costs: Costs, *, split: bool) -> Mapping[str, str]:
        dead = self._generation.dead_cells
        costs = replace(costs, backward_s=None)
        count = self._layout.replicas
        if costs.chunks > 1:
            simulation = dispatch_interleaved(costs, routing_around(dead, count, costs.stages, costs.micro_batches))
        else:
            simulation = plan_routed(RoutedCosts(replicas=(costs,) * count, dead=dead), split=split).simulation
        if names := ", ".join(f"stage {cell.stage} of replica {cell.replica}" for cell in sorted(dead)):
            text = "%d micro-batches a replica: those of %s are computed by live replicas"
            logger.info(text, costs.micro_batches, names)
        orders = cell_orders(simulation, costs)
        self.planned = Routing(1, costs.micro_batches, moved_by(simulation.schedule.routing), orders)
        return orders


def evaluation_order(layout: JobLayout, dead: frozenset[Cell], micro_batches: int, chunks: int = 1) -> CellOrder:
    """Forwards alone, by number and replica at every cell: one order of all, so that no two cells wait for each other.

    Those of a dead cell go round its live peers. Of several chunks each runs as many numbers as there are stages before
    the next one does, as in Megatron.
    """
    own, stages = layout.cell, 1 + max(cell.stage for cell in layout.cells)
    routing = routing_around(dead, layout.replicas, stages, micro_batches)
    schedule = RoutedSchedule(routing=routing, orders=(), chunks=chunks)
    mine = sorted(
        (number // stages, chunk, number, replica)
        for number in range(micro_batches)
        for replica in range(layout.replicas)
        for chunk in range(chunks)
        if routing.cell(own.stage, replica, number) == own
    )
    actions, receives = [], list[int]()
    for place, (_, chunk, number, replica) in enumerate(mine):
        action = RoutedAction(Kind.FORWARD, replica, number, chunk)
        needed, sent = schedule.needed(own.stage, action), schedule.produced(own.stage, action)
        if needed is not None:
            receives.append(place)
        source = None if needed is None else needed.source.replica
        target = None if sent is None else sent.target.replica
        actions.append(CellAction(Kind.FORWARD.value, chunk, replica, number, source, target, len(receives)))
    return CellOrder(tuple(actions), tuple(receives), None, 0.0)
