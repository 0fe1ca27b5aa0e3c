# SPDX-License-Identifier: Apache-2.0
"""Routes of micro-batches between replicas, as one rank follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adaptra_megatron.control.decisions import Moved, Routing
from adaptra_megatron.control.order.plans import PlanState
from adaptra_megatron.control.planner_process.keeper import PlannerClient
from adaptra_megatron.control.routes.cell_order import CellOrder
from adaptra_megatron.epochs.generation import Generation
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.log import logger_of
from adaptra_megatron.runtime.execution.program import Program
from adaptra_megatron.runtime.job import Job
from adaptra_megatron.runtime.megatron.megatron_call import PipelineCall
from adaptra_megatron.runtime.rerouting.degraded import DegradedRoutes
from adaptra_megatron.runtime.rerouting.inputs import RoutableInputs, receives_wait
from adaptra_megatron.runtime.rerouting.program import routed_program
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.placement import interleaved
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.transport.messages import Transport, TransportError, TwoPathTransport

logger = logger_of(__name__)


class Rerouting:
    """For the life of the job. Links to other replicas' cells are opened when routes lead there, and closed after."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        planner: PlannerClient | None,
        book: PlanState,
        *,
        swap: bool,
        joins: bool = False,
    ) -> None:
        """`planner`: of the leader; None on all other ranks. `swap`, `joins`: see `RoutableInputs`. Raises
        TransportError where no links can be opened while the job runs."""
        if not isinstance(transport, TwoPathTransport):
            raise TransportError(
                "--adaptra-reroute opens links between replicas while the job runs, which the host path can carry: use "
                "--adaptra-host-transport auto, and see above why links have one path"
            )
        self._job, self._planner, self._book, self._swap, self._joins = job, planner, book, swap, joins
        self._two_paths: TwoPathTransport = transport
        self._inputs: RoutableInputs | None = None
        self._routing = Routing(0, 0)
        self._check: Callable[[], None] = lambda: None
        self._order: CellOrder | None = None
        self._program: Program | None = None
        self._links: set[int] = set()
        """Ranks of other replicas that there are links to."""
        self._follows = self._routed = False
        """True where the iteration under way is routed as was decided; where it is routed at all."""
        self._pinned: Sequence[int] = ()
        """Stages whose micro-batches cannot be routed round slow cells."""
        self._degraded: DegradedRoutes | None = None
        """Where cells are dead."""
        self._dead: frozenset[Cell] = frozenset()
        self.routed_iterations = 0
        """How many were, so far."""

    def begin(self, call: PipelineCall, iteration: int, *, cold: bool) -> RoutableInputs:
        """A training iteration begins; returns where its inputs come from. The first time, collective over the job.
        `cold`: whether it is to run stock's order (see `FirstIterations`).

        Raises UnsupportedFeatureError where replicas cannot take each other's micro-batches.
        """
        if self._inputs is None:
            layout, control = self._job.layout, self._job.control
            self._inputs = RoutableInputs(
                *(call, control, layout, self._job.timeout_s),
                swap=self._swap,
                joins=self._joins,
                check=lambda: self._check(),
            )
            self._pinned = _pinned(self._inputs, call)
            if self._planner is not None and self._degraded is None:
                self._planner.pin(self._pinned)
                _tell_limits(self._inputs, call)
        self._follows = (
            self._order is not None
            and self._routing.micro_batches == call.micro_batches
            and not (cold or call.forward_only)
        )
        self._routed = self._follows or self._degraded is not None
        slowness = self._routing.slowness
        self._inputs.begin(call, iteration, routed=self._routed, slowness=slowness, dead=self._dead)
        return self._inputs

    def enter(
        self,
        generation: Generation,
        control: ControlStore,
        planner: PlannerClient | None,
        check: Callable[[], None],
    ) -> None:
        """Go on with the cells that live in `generation`; all links begin anew. `control`: its part of the job's
        store. `planner`: of its leader.
        `check`: raises once it has ended."""
        layout = self._job.layout
        self._two_paths.enter(control)
        for peer in list(self._two_paths.peers):
            self._two_paths.close_link(peer)
        self._links.clear()
        self._order = self._program = self._degraded = None
        self._routing, self._dead, self._check, self._planner = Routing(0, 0), generation.dead_cells, check, planner
        if generation.dead_cells:
            self._degraded = DegradedRoutes(layout, generation, control, self._job.timeout_s, check)
            return
        if planner is not None:
            planner.pin(self._pinned)
        own = interleaved(len(layout.pipeline), self._book.layout.chunks)
        for stage in own.peers(layout.cell.stage):
            self._two_paths.open_link(layout.pipeline[stage])
        check()  # what aborted all links as the generation before ended may have come before these

    @property
    def moved_from_dead(self) -> tuple[Moved, ...]:
        """What training's routes around dead cells move, on the rank that has planned them."""
        planned = None if self._degraded is None else self._degraded.planned
        return () if planned is None else planned.moved

    @property
    def swapped_micro_batches(self) -> int:
        """Number of other replicas' micro-batches that this one has taken by swaps, so far."""
        return 0 if self._inputs is None else self._inputs.swapped

    def follow(self, routing: Routing | None) -> None:
        """What was decided; None: nothing new."""
        if routing is None:
            return
        layout = self._job.layout
        self._routing, self._program = routing, None
        self._order = CellOrder.unpacked(routing.orders[str(layout.cell)]) if routing.number else None

    def order(self, call: PipelineCall, schedule: Schedule) -> tuple[Program, CellOrder] | None:
        """What this rank runs in the iteration under way; None where that is the plan of its pipeline."""
        if not self._routed:
            return None
        order = self._order
        if self._degraded is not None and not self._follows:
            order = self._degraded_order(self._degraded, call)
        assert order is not None, "an iteration is routed without an order"
        if self._program is None or self._program.schedule is not schedule:
            self._program = routed_program(order, self._job.layout, schedule)
            for peer in others(self._program, self._job.layout, also_own=self._degraded is not None) - self._links:
                self._two_paths.open_link(peer)
                self._links.add(peer)
            self._check()  # what aborted all links as the generation ended may have come before these
        return self._program, order

    def _degraded_order(self, degraded: DegradedRoutes, call: PipelineCall) -> CellOrder:
        count = call.micro_batches
        costs, split = self._book.planned_for(count), True
        if costs is None:
            split = not self._book.layout.whole_first
            costs = uniform_costs(
                call.stages, count, chunks=call.chunks, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0
            )
            costs = replace(costs, max_in_flight=self._book.caps(count))
        order = degraded.order(costs, split=split, forward_only=call.forward_only)
        if self._planner is not None and degraded.planned is not None:
            self._planner.run(degraded.planned)
        return order

    def end(self, losses: list[Any]) -> list[Any]:
        """What the training script gets of `losses`, those that were computed here."""
        assert self._inputs is not None, "an iteration ends that has not begun"
        last = max(cell.stage for cell in self._job.layout.cells)
        moved = self._degraded is not None or any(move.stage == last for move in self._routing.moved)
        return self._inputs.end(losses, losses_moved=self._routed and moved)

    def ended(self, *, forward_only: bool) -> None:
        """The iteration will not be attempted again."""
        assert self._inputs is not None, "an iteration ends that has not begun"
        self._inputs.ended()
        self.routed_iterations += self._routed and not forward_only
        if self._degraded is not None or forward_only:
            return
        # All that was sent in the iteration before has been received: this one began with waiting for that.
        needed = others(self._program, self._job.layout) if self._routed and self._program is not None else set()
        for peer in self._links - needed:
            self._two_paths.close_link(peer)
        self._links &= needed


def _pinned(inputs: RoutableInputs, call: PipelineCall) -> Sequence[int]:
    """Stages whose micro-batches cannot be routed."""
    if receives_wait(call):
        return range(call.stages)
    return () if inputs.routable else (0, call.stages - 1)


def _tell_limits(inputs: RoutableInputs, call: PipelineCall) -> None:
    """What of routing there will be, to the log."""
    if inputs.swaps:
        logger.info("--adaptra-reroute: whole micro-batches are swapped between replicas, by the lengths of their data")
    if receives_wait(call):
        logger.warning("--adaptra-reroute: no stage is routed, since receives of unknown size wait for headers")
    elif not inputs.routable:
        logger.warning(
            "--adaptra-reroute: the data iterator cannot say what other replicas read, so the first and the "
            "last stage keep their micro-batches; hand in an adaptra_megatron.routable_data"
        )


def others(program: Program, layout: JobLayout, *, also_own: bool = False) -> set[int]:
    """Ranks that `program` exchanges messages with: of other replicas, and with `also_own` of this one."""
    messages = [message for step in program.steps for message in (step.receive, step.send) if message is not None]
    ends = {end for message in messages for end in (message.source, message.target)}
    return ends - ({layout.rank} if also_own else set(layout.pipeline))
