# SPDX-License-Identifier: Apache-2.0
"""Route micro-batches between replicas: one rank's part of the routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.route_decider import (
    CellAction,
    CellOrder,
    cell_costs,
    cell_order,
    cell_orders,
    moved_by,
)
from adaptra_megatron.control.decisions import Decision, Moved, RoutingSection
from adaptra_megatron.control.sidecar.planner_client import PlannerClient
from adaptra_megatron.elastic.failure_errors import LateRankError
from adaptra_megatron.elastic.generation import Generation
from adaptra_megatron.elastic.protocol_store import said_by_one
from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.engine.iteration_hooks import EngineFeature, Inputs, IterationHooks
from adaptra_megatron.engine.iteration_work import Work
from adaptra_megatron.engine.routed_inputs import RoutableInputs, receives_wait
from adaptra_megatron.megatron.compat import average_group
from adaptra_megatron.megatron.feature_refusals import refuse_for_rerouting
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.schedule.costs import Costs, uniform_costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule, interleaved
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.routing.interleaved import dispatch_interleaved, routing_around
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.schedule.routing.routed_plans import RoutedAction, RoutedMessage, RoutedSchedule
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage, needed, produced
from adaptra_megatron.transport.message_keys import TransportError, TwoPathTransport

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

logger = logger_of(__name__)


# What each cell runs while others are dead: their micro-batches are spread over the live cells of their stage.


class DegradedRoutes:
    """Routes of one rank in a generation with dead cells.

    The lowest live rank plans training; routes of evaluation follow from the dead cells.
    """

    def __init__(
        self,
        layout: JobLayout,
        generation: Generation,
        control: ControlStore,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """`check`: called in every wait; raises once the generation has ended."""
        self._layout, self._generation, self._control = layout, generation, control
        self._timeout_s, self._check = timeout_s, check
        self.planned: RoutingSection | None = None
        """Latest routes of training, on the rank that planned them."""
        self._orders: dict[tuple[int, bool], CellOrder] = {}

    def order(self, costs: Costs, *, split: bool, forward_only: bool) -> CellOrder:
        """Return the order of this rank's cell. `costs`: of one pipeline; all ranks use the costs of the lowest live
        rank.

        Raises LateRankError if that rank does not publish its order within the timeout.
        """
        key = costs.micro_batches, forward_only
        if key not in self._orders:
            if forward_only:
                count, chunks = costs.micro_batches, costs.chunks
                self._orders[key] = evaluation_order(self._layout, self._generation.dead_cells, count, chunks)
            else:
                with self._control.lent("degraded", self._timeout_s) as store:
                    self._orders[key] = self._planned_by_one(store, costs, split=split)
        return self._orders[key]

    def _planned_by_one(self, store: SealedStore, costs: Costs, *, split: bool) -> CellOrder:
        place = f"orders/{costs.micro_batches}"
        if self._layout.rank == min(self._generation.live):
            for cell, order in self._plan(costs, split=split).items():
                store.set_parts(f"{place}/{cell}", order.encode())
        try:
            found = said_by_one(store, f"{place}/{self._layout.cell}", None, self._timeout_s, self._check)
        except TimeoutError as cause:
            raise LateRankError(
                f"{self._layout.name(min(self._generation.live))} has not planned for the live cells within "
                f"{self._timeout_s:g} s (--adaptra-timeout-s); look at its log"
            ) from cause
        return CellOrder.unpacked(found.decode())

    def _plan(self, costs: Costs, *, split: bool) -> Mapping[str, str]:
        dead = self._generation.dead_cells
        costs = cell_costs(costs)
        count = self._layout.replicas
        if costs.chunks > 1:
            simulation = dispatch_interleaved(costs, routing_around(dead, count, costs.stages, costs.micro_batches))
        else:
            job = JobCosts(costs, replicas=count)
            simulation = plan_routed(RoutedCosts(job=job, dead=dead), split=split).simulation
        if names := ", ".join(f"stage {cell.stage} of replica {cell.replica}" for cell in sorted(dead)):
            text = "%d micro-batches a replica: those of %s are computed by live replicas"
            logger.info(text, costs.micro_batches, names)
        orders = cell_orders(simulation, costs)
        self.planned = RoutingSection(1, costs.micro_batches, moved_by(simulation.schedule.routing), orders)
        return orders


def evaluation_order(layout: JobLayout, dead: frozenset[Cell], micro_batches: int, chunks: int = 1) -> CellOrder:
    """Return the order of forwards at this rank's cell.

    Micro-batches of a dead cell are dealt out to its live peers. With several chunks, as many micro-batches as there
    are stages run before the next chunk does, as in Megatron.
    """
    own, stages = layout.cell, 1 + max(cell.stage for cell in layout.cells)
    routing = routing_around(dead, layout.replicas, stages, micro_batches)
    schedule = RoutedSchedule(routing=routing, orders=(), chunks=chunks)

    def rank(stage: int, chunk: int, micro_batch: int, replica: int) -> tuple[int, ...]:
        return micro_batch // stages, chunk, micro_batch, replica, stage

    def made(message: RoutedMessage) -> tuple[int, ...]:
        stage = message.source.stage
        return rank(stage, message.chunk - (stage == stages - 1), message.micro_batch, message.replica)

    ranks = sorted(
        rank(own.stage, chunk, number, replica)
        for number in range(micro_batches)
        for replica in range(layout.replicas)
        for chunk in range(chunks)
        if routing.cell(own.stage, replica, number) == own
    )
    order = [RoutedAction(Kind.FORWARD, replica, number, chunk) for _, chunk, number, replica, _ in ranks]
    return cell_order(schedule, own.stage, order, ranks, made)


# A cell's order of routed micro-batches, as the executor runs it.


def routed_program(order: CellOrder, layout: JobLayout, schedule: Schedule) -> Program:
    """Compile the order of this rank's cell. Micro-batches have job-wide numbers, messages global ranks.

    `schedule`: of one pipeline, for its placement and number of micro-batches.
    """
    actions = [
        Action(layout.cell.stage, Kind(each.kind), each.chunk, each.replica * schedule.micro_batches + each.micro_batch)
        for each in order.actions
    ]
    steps = tuple(
        ProgramStep(
            position=index,
            action=action,
            receive=_message(needed(action, schedule.placement), each, layout),
            send=_message(produced(action, schedule.placement), each, layout),
            receives_before=each.receives_before,
            receives_before_send=each.receives_before,
            completes_chunk=False,  # cells have no common order: all reductions come after all actions
        )
        for index, (action, each) in enumerate(zip(actions, order.actions, strict=True))
    )
    receives: dict[OrderedMessage, int] = {}
    for place, index in enumerate(order.receives):
        message = steps[index].receive
        assert message is not None, f"{steps[index].action} needs no message"
        receives[message] = place
    return Program(schedule, layout.cell.stage, steps, receives)


def _message(message: OrderedMessage | None, action: CellAction, layout: JobLayout) -> OrderedMessage | None:
    """Convert `message` between stages to one between ranks: those of this rank's lane in the cells that `action`
    names.
    """
    if message is None:
        return None
    replicas = (action.source, layout.cell.replica), (layout.cell.replica, action.target)
    source, target = replicas[message.source == layout.cell.stage]
    assert source is not None, f"{action} has a message of no cell"
    assert target is not None, f"{action} has a message to no cell"
    lane = layout.workers[layout.rank].lane
    return message._replace(
        source=layout.cells[Cell(source, message.source)][lane],
        target=layout.cells[Cell(target, message.target)][lane],
    )


class ReroutedTraining(EngineFeature):
    """Lets replicas compute micro-batches of others."""

    def __init__(self, config: AdaptraConfig) -> None:
        super().__init__()
        self._config = config
        self._reroutings: list[Rerouting] = []

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        """See EngineFeature. Raises TransportError if links cannot be opened while the job runs."""
        config = self._config
        found = Rerouting(pipeline, swap=config.avoids_stragglers, evaluates=config.is_fault_tolerant)
        self._reroutings.append(found)
        return found

    def summary(self) -> Mapping[str, Any]:
        return {
            "routed_iterations": sum(each.routed_iterations for each in self._reroutings),
            "swapped_micro_batches": sum(each.swapped_micro_batches for each in self._reroutings),
        }


class Rerouting(IterationHooks):
    """Routes of one rank. Opens links to other replicas' cells when routes need them, and closes them afterwards."""

    def __init__(self, pipeline: Pipeline, *, swap: bool, evaluates: bool) -> None:
        """`swap`: see `RoutableInputs`. `evaluates`: whether evaluations are also routed around dead cells.

        Raises TransportError if links cannot be opened while the job runs.
        """
        super().__init__(pipeline)
        transport = pipeline.transport
        if not isinstance(transport, TwoPathTransport):
            raise TransportError(
                "--adaptra-reroute opens links between replicas while the job runs, which the host path can carry: use "
                "--adaptra-host-transport auto, and see above why links have one path"
            )
        self._job, self._planner, self._book = pipeline.job, pipeline.planner, pipeline.book
        self._swap, self._evaluates = swap, evaluates
        self._two_paths: TwoPathTransport = transport
        self._inputs: RoutableInputs | None = None
        self._routing = RoutingSection(0, 0)
        self._check: Callable[[], None] = lambda: None
        self._order: CellOrder | None = None
        self._program: Program | None = None
        self._links: set[int] = set()
        """Ranks of other replicas with open links."""
        self._follows = self._routed = False
        """True if the present iteration follows routes of a decision; and if it is routed at all."""
        self._pinned: Sequence[int] = ()
        """Stages whose micro-batches cannot be routed around slow cells."""
        self._degraded: DegradedRoutes | None = None
        """Routes around dead cells; None if there are none."""
        self._dead: frozenset[Cell] = frozenset()
        self._averages: Any = None
        """See `average_group`."""
        self.routed_iterations = 0
        """Number of routed iterations so far."""

    def wrap_inputs(self, call: PipelineCall, inputs: Inputs) -> Inputs:
        """See IterationHooks. The first call is collective over the job.

        Raises UnsupportedFeatureError if replicas cannot compute each other's micro-batches.
        """
        if not self._routes(call):
            return inputs
        if self._inputs is None:
            refuse_for_rerouting(call.config)  # trainers without Megatron's arguments
            layout, control = self._job.layout, self._job.control
            self._inputs = RoutableInputs(
                *(call, control, layout, self._job.timeout_s),
                swap=self._swap,
                joins=self.pipeline.rejoins,
                fails=self._evaluates,
                check=lambda: self._check(),
            )
            self._pinned = _pinned(self._inputs, call)
            if self._planner is not None and self._degraded is None:
                self._planner.pin(self._pinned)
                _tell_limits(self._inputs, call)
        self._follows = (
            self._order is not None
            and self._routing.micro_batches == call.micro_batches
            and not (self.pipeline.cold or call.forward_only)
        )
        self._routed = self._follows or self._degraded is not None
        slowness = self._routing.slowness
        self._inputs.begin(call, self.pipeline.iterations, routed=self._routed, slowness=slowness, dead=self._dead)
        return self._inputs

    def enter(
        self,
        generation: Generation,
        control: ControlStore,
        planner: PlannerClient | None,
        check: Callable[[], None],
    ) -> None:
        """Continue with the live cells of `generation`; all links start anew.

        `control`: the generation's part of the job's store. `planner`: of its leader. `check`: raises once it has
        ended.
        """
        layout = self._job.layout
        self._two_paths.enter(control)
        for peer in list(self._two_paths.peers):
            self._two_paths.close_link(peer)
        self._links.clear()
        self._order = self._program = self._degraded = None
        self._routing, self._dead, self._check, self._planner = (
            RoutingSection(0, 0),
            generation.dead_cells,
            check,
            planner,
        )
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
    def moved_from_dead(self) -> tuple[Moved, ...] | None:
        """Return the moves of the routes around dead cells; None on ranks that do not plan them, and until a training
        iteration is planned.
        """
        if self._degraded is None:
            return ()
        planned = self._degraded.planned
        return None if planned is None else planned.moved

    @property
    def swapped_micro_batches(self) -> int:
        """Return the number of other replicas' micro-batches that this replica has computed by swaps so far."""
        return 0 if self._inputs is None else self._inputs.swapped

    def follow(self, decision: Decision) -> None:
        routing = decision.routing
        if routing is None:
            return
        layout = self._job.layout
        self._routing, self._program = routing, None
        self._order = CellOrder.unpacked(routing.orders[str(layout.cell)]) if routing.number else None

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        if not (self._routes(call) and self._routed):
            return work()
        program, order = self._ordered(call, schedule)
        if not call.forward_only:
            _gather_parameters(call.model_chunks)
        return self.pipeline.works.routed(call, program, order, self.pipeline.iterations)

    def _routes(self, call: PipelineCall) -> bool:
        return self._evaluates or not call.forward_only

    def _ordered(self, call: PipelineCall, schedule: Schedule) -> tuple[Program, CellOrder]:
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

    def wrap_losses(self, call: PipelineCall, losses: list[Any]) -> list[Any]:
        if not self._routes(call):
            return losses
        assert self._inputs is not None, "an iteration ends that has not begun"
        last = max(cell.stage for cell in self._job.layout.cells)
        moved = self._degraded is not None or any(move.stage == last for move in self._routing.moved)
        return self._inputs.end(losses, losses_moved=self._routed and moved)

    def commit(self, call: PipelineCall) -> None:
        if not self._routes(call):
            return
        assert self._inputs is not None, "an iteration ends that has not begun"
        self._inputs.ended()
        self.routed_iterations += self._routed and not call.forward_only
        if self._degraded is not None or call.forward_only:
            return
        self._averages = average_group(self._averages)
        # All that was sent in the iteration before has been received: this one began with waiting for that.
        needed = others(self._program, self._job.layout) if self._routed and self._program is not None else set()
        for peer in self._links - needed:
            self._two_paths.close_link(peer)
        self._links &= needed


def _pinned(inputs: RoutableInputs, call: PipelineCall) -> Sequence[int]:
    """Return the stages whose micro-batches cannot be routed."""
    if receives_wait(call):
        return range(call.stages)
    return () if inputs.routable else (0, call.stages - 1)


def _tell_limits(inputs: RoutableInputs, call: PipelineCall) -> None:
    """Log which stages cannot be routed."""
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
    """Return the ranks of other replicas with which `program` exchanges messages; with `also_own`, of all replicas."""
    messages = [message for step in program.steps for message in (step.receive, step.send) if message is not None]
    ends = {end for message in messages for end in (message.source, message.target)}
    return ends - ({layout.rank} if also_own else set(layout.pipeline))


def _gather_parameters(model_chunks: Sequence[Any]) -> None:
    """Gather all parameters before the first action. Collective over each stage's replicas.

    Otherwise the first forwards would gather them (distributed_data_parallel.py: _make_forward_pre_hook) and wait for
    the forwards of other replicas. If micro-batches are routed, another replica may run its forward only after a
    backward that waits for this forward, or never. Does nothing for gathered parameters.
    """
    for model in model_chunks:
        if getattr(model, "remove_forward_pre_hook_handles", None):
            for group in reversed(model.bucket_groups + model.expert_parallel_bucket_groups):  # as modules come
                group.finish_param_sync()
