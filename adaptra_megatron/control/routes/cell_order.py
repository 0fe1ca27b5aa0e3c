# SPDX-License-Identifier: Apache-2.0
"""Pack the order that one cell runs while micro-batches are routed between replicas, small enough to travel."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.control.decisions import Moved
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.routing.routed_plans import RoutedAction, RoutedMessage, RoutedSchedule, Routing
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation

MOST_NBYTES = 1 << 24


class CellAction(NamedTuple):
    """One action, of any replica's micro-batch, and its messages."""

    kind: str
    """F, B, I or W."""
    chunk: int
    replica: int
    """Whose micro-batch it is."""
    micro_batch: int
    """Within that replica."""
    source: int | None
    """Replica of the cell that makes what it needs; None where no message has to come."""
    target: int | None
    """Replica of the cell that needs what it makes; None where nothing is sent."""
    receives_before: int
    """How many of the order's receives are posted before it is launched."""


@dataclass(frozen=True)
class CellOrder:
    """All of an iteration."""

    actions: tuple[CellAction, ...]
    receives: tuple[int, ...]
    """Places of the actions that need a message, in the order in which the receives are posted."""
    cap: float | None
    """Activations that the cell may hold."""
    released_at_backward_input: float
    """The fraction of an activation that the cap counts as free after an input gradient."""

    def packed(self) -> str:
        """As it travels."""
        return packed(self).decode()

    @classmethod
    def unpacked(cls, text: str) -> CellOrder:
        """Raises ValueError for what is none."""
        order: CellOrder = unpacked(text.encode(), cls, MOST_NBYTES)
        return order


def cell_orders(simulation: RoutedSimulation, costs: Costs) -> dict[str, str]:
    """Return what each cell ("replica.stage") runs, packed. `costs`: of a pipeline, for its caps.

    Receives are posted in the order in which what makes the messages is expected to begin, and each right before the
    first action that begins later: see schedule.transfers.launch_order, whose proof asks for nothing else.
    """
    schedule = simulation.schedule
    cells = [Cell(*divmod(number, schedule.stages)) for number in range(len(schedule.orders))]
    begun = sorted(
        (begin_s, place, number)
        for number, starts_s in enumerate(simulation.start_s)
        for place, begin_s in enumerate(starts_s)
    )
    ranks = {(number, place): rank for rank, (_begin_s, place, number) in enumerate(begun)}
    made: dict[RoutedMessage, int] = {}
    for number, order in enumerate(schedule.orders):
        for place, action in enumerate(order):
            if (message := schedule.produced(cells[number].stage, action)) is not None:
                made[message] = ranks[number, place]
    found = {}
    for number, (cell, order) in enumerate(zip(cells, schedule.orders, strict=True)):
        needed = [schedule.needed(cell.stage, action) for action in order]
        awaited = sorted((made[message], place) for place, message in enumerate(needed) if message is not None)
        producers = [rank for rank, _place in awaited]
        actions = []
        for place, (action, message) in enumerate(zip(order, needed, strict=True)):
            sent = schedule.produced(cell.stage, action)
            source = None if message is None else message.source.replica
            target = None if sent is None else sent.target.replica
            before = bisect.bisect_left(producers, ranks[number, place])
            kind = action.kind.value
            actions.append(CellAction(kind, action.chunk, action.replica, action.micro_batch, source, target, before))
        released = costs.released_at_backward_input[cell.stage]
        receives = tuple(place for _rank, place in awaited)
        cap = costs.max_in_flight[cell.stage]
        found[str(cell)] = CellOrder(tuple(actions), receives, cap, released).packed()
    return found


def moved_by(routing: Routing) -> tuple[Moved, ...]:
    """Moves of `routing`, as a decision carries them."""
    return tuple(
        Moved(move.source.stage, move.source.replica, move.target.replica, len(move.micro_batches))
        for move in routing.moves()
    )


def schedule_of(orders: Mapping[str, str], replicas: int, stages: int, micro_batches: int) -> RoutedSchedule:
    """The schedule that packed orders of all cells are of. Raises ValueError for what are none."""
    hosts = [[0] * (replicas * micro_batches) for _ in range(stages)]
    found = [tuple[RoutedAction, ...]() for _ in range(replicas * stages)]
    for name, text in orders.items():
        host, stage = map(int, name.split("."))
        actions = CellOrder.unpacked(text).actions
        found[host * stages + stage] = tuple(
            RoutedAction(Kind(each.kind), each.replica, each.micro_batch, each.chunk) for each in actions
        )
        for each in actions:
            if each.kind == Kind.FORWARD.value:
                hosts[stage][each.replica * micro_batches + each.micro_batch] = host
    return RoutedSchedule(routing=Routing(replicas, micro_batches, tuple(map(tuple, hosts))), orders=tuple(found))
