# SPDX-License-Identifier: Apache-2.0
"""Order the actions of cells with several model chunks while cells are dead; keeps caps, and cannot deadlock.

Micro-batches of a dead cell are dealt out to its live peers. A micro-batch is admitted once each of its cells has room
for all the chunks that it will run there. It keeps that room until the backward of the last of these chunks (the
banker's algorithm: every admitted micro-batch can finish). Among admitted work that can run, backwards go before
forwards, later chunks before earlier ones, then lower numbers. Backwards are whole, since a delayed weight gradient
would keep the room.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.routing.routed_costs import RoutingError
from adaptra_megatron.schedule.routing.routed_plans import RoutedAction, RoutedSchedule, Routing
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation, peak_of


def routing_around(dead: Collection[Cell], replicas: int, stages: int, micro_batches: int) -> Routing:
    """Route micro-batches of `dead` cells to live cells of their stage in turn, and all others to their own replica's
    cells.

    Raises RoutingError for a stage without a live cell.
    """
    rows = []
    for stage in range(stages):
        live = [replica for replica in range(replicas) if Cell(replica, stage) not in dead]
        if not live:
            raise RoutingError(f"all {replicas} cells of stage {stage} take no work: restart from a checkpoint")
        rows.append(
            tuple(
                replica if replica in live else live[number % len(live)]
                for replica in range(replicas)
                for number in range(micro_batches)
            )
        )
    return Routing(replicas, micro_batches, tuple(rows))


def dispatch_interleaved(costs: Costs, routing: Routing) -> RoutedSimulation:
    """Return the orders of all cells of a job whose pipelines each cost `costs`, with Megatron's placement of chunks.

    A message is assumed to find its link idle. Raises RoutingError for a cap below the chunks of one micro-batch.
    """
    return _Dispatch(costs, routing).run()


class _Dispatch:
    def __init__(self, costs: Costs, routing: Routing) -> None:
        self._costs, self._routing = costs, routing
        self._stages, self._chunks = costs.stages, costs.chunks
        for stage, cap in enumerate(costs.max_in_flight):
            if cap is not None and cap < costs.chunks:
                raise RoutingError(
                    f"stage {stage} may hold {cap:g} activations, fewer than the {costs.chunks} chunks of one "
                    "micro-batch: raise --adaptra-max-in-flight"
                )
        count = routing.replicas * costs.stages
        self._orders: list[list[RoutedAction]] = [[] for _ in range(count)]
        self._start_s: list[list[float]] = [[] for _ in range(count)]
        self._end_s: list[list[float]] = [[] for _ in range(count)]
        self._waiting: list[list[tuple[tuple[bool, int, int, int], RoutedAction]]] = [[] for _ in range(count)]
        """Heap of the actions that could begin, by cell."""
        self._free_s = [0.0] * count
        self._held = [0] * count
        """Reserved activations, by cell."""
        self._admitted = [0] * routing.replicas
        """Number of each replica's micro-batches that have been admitted, in ascending order."""
        self._events: dict[float, list[tuple[int, RoutedAction | None]]] = defaultdict(list)
        """Events by time: an action that becomes possible at a cell, or None: the cell becomes free."""
        self._moments: list[float] = []

    def run(self) -> RoutedSimulation:
        self._admit(0.0)
        while self._moments:
            now_s = heapq.heappop(self._moments)
            events = self._events.pop(now_s)
            for cell, action in events:
                if action is not None:
                    heapq.heappush(self._waiting[cell], (_urgency(action), action))
            for cell in sorted({cell for cell, _ in events}):
                if self._waiting[cell] and self._free_s[cell] <= now_s:
                    self._begin(cell, heapq.heappop(self._waiting[cell])[1], now_s)
        schedule = RoutedSchedule(
            routing=self._routing, orders=tuple(map(tuple, self._orders)), chunks=self._costs.chunks
        )
        makespan_s = max((times[-1] for times in self._end_s if times), default=0.0)
        return RoutedSimulation(
            schedule=schedule,
            makespan_s=makespan_s,
            period_s=makespan_s,
            start_s=tuple(map(tuple, self._start_s)),
            end_s=tuple(map(tuple, self._end_s)),
            peak_in_flight=tuple(peak_of(order, 0.0) for order in schedule.orders),
        )

    def _admit(self, now_s: float) -> None:
        """Admit all micro-batches for which there is room, one of each replica in turn."""
        before = -1
        while sum(self._admitted) > before:
            before = sum(self._admitted)
            for replica, number in enumerate(self._admitted):
                if number < self._routing.micro_batches and self._keep_room(replica, number):
                    self._admitted[replica] += 1
                    self._ready(0, RoutedAction(Kind.FORWARD, replica, number, 0), now_s)

    def _keep_room(self, replica: int, number: int) -> bool:
        cells = [self._cell(stage, replica, number) for stage in range(self._stages)]
        for cell, cap in zip(cells, self._costs.max_in_flight, strict=True):
            if cap is not None and self._held[cell] + self._chunks > cap:
                return False
        for cell in cells:
            self._held[cell] += self._chunks
        return True

    def _begin(self, cell: int, action: RoutedAction, now_s: float) -> None:
        stage, forward = cell % self._stages, action.kind is Kind.FORWARD
        table = self._costs.forward_s if forward else self._costs.whole_backward_s
        end_s = now_s + table[stage][action.chunk]
        self._orders[cell].append(action)
        self._start_s[cell].append(now_s)
        self._end_s[cell].append(end_s)
        self._free_s[cell] = end_s
        self._at(end_s, cell, None)
        self._follow(stage, action, end_s)
        if not forward and action.chunk == 0:
            self._held[cell] -= self._chunks
            self._admit(now_s)  # what comes here now begins after this action

    def _follow(self, stage: int, action: RoutedAction, end_s: float) -> None:
        """Add the actions that `action` makes possible."""
        forward, place = action.kind is Kind.FORWARD, action.chunk * self._stages + stage
        if forward and place == self._stages * self._chunks - 1:
            self._ready(stage, action._replace(kind=Kind.BACKWARD), end_s)
            return
        after = place + (1 if forward else -1)
        if after < 0:
            return
        chunk, there = divmod(after, self._stages)
        arrival_s = end_s + self._costs.link(stage, there).transfer_s
        self._ready(there, action._replace(chunk=chunk), arrival_s)

    def _ready(self, stage: int, action: RoutedAction, at_s: float) -> None:
        self._at(at_s, self._cell(stage, action.replica, action.micro_batch), action)

    def _at(self, at_s: float, cell: int, action: RoutedAction | None) -> None:
        if at_s not in self._events:
            heapq.heappush(self._moments, at_s)
        self._events[at_s].append((cell, action))

    def _cell(self, stage: int, replica: int, number: int) -> int:
        return self._routing.cell(stage, replica, number).replica * self._stages + stage


def _urgency(action: RoutedAction) -> tuple[bool, int, int, int]:
    forward = action.kind is Kind.FORWARD
    return forward, -action.chunk if forward else action.chunk, action.micro_batch, action.replica
