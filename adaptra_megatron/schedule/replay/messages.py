# SPDX-License-Identifier: Apache-2.0
"""Messages of recordings that have computation alone: which there were, and how long each was under way.

A stage that waited for a message began the moment it came: so long it was under way. A message that came before it was
needed is taken for as quick as the others of its link usually are, as far as there was time for that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from adaptra_megatron.schedule.placement import interleaved
from adaptra_megatron.schedule.replay.operations import Operation, OpType, RecordedStep, numbered
from adaptra_megatron.schedule.routing.costs import Cell

_SENT = {
    OpType.FORWARD: (OpType.FORWARD_SEND, OpType.FORWARD_RECV),
    OpType.BACKWARD: (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV),
    OpType.BACKWARD_INPUT: (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV),
}
_Key = tuple[Cell, OpType, int, int]
"""Cell, what it receives for an action, chunk and micro-batch."""


def with_messages(step: RecordedStep) -> RecordedStep:
    """`step` with the sends and receives that its actions must have had, in Megatron's placement; as it is if it has
    any recorded."""
    if any(each.optype.peer is not None for each in step.operations):
        return step
    ready_s: dict[_Key, float] = {}
    """Since when a cell had nothing else to do than the action that needs the message."""
    users: dict[_Key, Operation] = {}
    for operations in step.by_cell().values():
        over_s = step.start_s
        for operation in operations:
            if operation.optype in _SENT:
                key = (operation.cell, _SENT[operation.optype][1], operation.chunk, operation.micro_batch)
                users[key], ready_s[key] = operation, over_s
            over_s = max(over_s, operation.end_s)
    pairs = list(_pairs(step, users))
    usual_s = _usual(pairs, ready_s, users)
    found: list[Operation] = []
    for sender, key in pairs:
        user = users[key]
        room_s = max(0.0, user.start_s - sender.end_s)
        waited = ready_s[key] <= sender.end_s
        under_way_s = room_s if waited else min(room_s, usual_s.get((sender.cell.stage, user.cell.stage), 0.0))
        sent = Operation(sender.cell, _SENT[sender.optype][0], sender.end_s, under_way_s, 0, sender.chunk, -1)
        found += [sent, sent._replace(cell=user.cell, optype=key[1], chunk=user.chunk, micro_batch=user.micro_batch)]
    return replace(step, operations=numbered([*step.operations, *found]))


def _pairs(step: RecordedStep, users: Mapping[_Key, Operation]) -> Iterator[tuple[Operation, _Key]]:
    """What sends a message, and what uses it."""
    placement = interleaved(step.stages, 1 + max((each.chunk for each in step.operations), default=0))
    for operation in step.operations:
        if operation.optype not in _SENT:
            continue
        forward = operation.optype is OpType.FORWARD
        place = (placement.next_place if forward else placement.previous_place)(operation.cell.stage, operation.chunk)
        if place is None or place.stage == operation.cell.stage:
            continue
        key = (
            Cell(operation.cell.replica, place.stage),
            _SENT[operation.optype][1],
            place.chunk,
            operation.micro_batch,
        )
        if key in users:
            yield operation, key


def _usual(
    pairs: Sequence[tuple[Operation, _Key]], ready_s: Mapping[_Key, float], users: Mapping[_Key, Operation]
) -> dict[tuple[int, int], float]:
    """By link: the median of the messages that were waited for."""
    waited: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sender, key in pairs:
        if ready_s[key] <= sender.end_s:
            waited[sender.cell.stage, key[0].stage].append(max(0.0, users[key].start_s - sender.end_s))
    return {ends: statistics.median(row) for ends, row in waited.items()}
