# SPDX-License-Identifier: Apache-2.0
"""A cell's order of routed micro-batches, as the executor runs it."""

from __future__ import annotations

from adaptra_megatron.control.routes.cell_order import CellAction, CellOrder
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.runtime.execution.program import Program, Step
from adaptra_megatron.schedule.actions import Action, Kind, Schedule
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.schedule.transfers.messages import Message, needed, produced


def routed_program(order: CellOrder, layout: JobLayout, schedule: Schedule) -> Program:
    """What this rank's cell runs. Micro-batches have numbers of the job, replica by replica, and ends of messages are
    global ranks. `schedule`: of a pipeline by itself, for its placement and the number of its micro-batches."""
    actions = [
        Action(layout.cell.stage, Kind(each.kind), each.chunk, each.replica * schedule.micro_batches + each.micro_batch)
        for each in order.actions
    ]
    last_gradient = {
        action.chunk: index
        for index, action in enumerate(actions)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    }
    steps = tuple(
        Step(
            position=index,
            action=action,
            receive=_message(needed(action, schedule.placement), each, layout),
            send=_message(produced(action, schedule.placement), each, layout),
            receives_before=each.receives_before,
            receives_before_send=each.receives_before,
            completes_chunk=last_gradient.get(action.chunk) == index,
        )
        for index, (action, each) in enumerate(zip(actions, order.actions, strict=True))
    )
    receives: dict[Message, int] = {}
    for place, index in enumerate(order.receives):
        message = steps[index].receive
        assert message is not None, f"{steps[index].action} needs no message"
        receives[message] = place
    return Program(schedule, layout.cell.stage, steps, receives)


def _message(message: Message | None, action: CellAction, layout: JobLayout) -> Message | None:
    """`message` between stages as one between ranks: those of this rank's lane in the cells that the order names."""
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
