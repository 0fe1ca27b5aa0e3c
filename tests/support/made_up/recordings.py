# SPDX-License-Identifier: Apache-2.0
"""Recordings of made-up jobs: stock's 1F1B with sends and receives that block, run by a slow, obvious simulation.

Every cell runs a list of slots. What is in a slot begins together; each part needs all cells that share its key, and
ends its own time after the last of them has come; the cell goes on when all parts of the slot are over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adaptra_megatron.schedule.replay.operations import Operation, OpType, RecordedStep, numbered
from adaptra_megatron.schedule.routing.costs import Cell

Seconds = Callable[[OpType, Cell, int], float]
"""Work of an operation of a type, at a cell (of a message: its sender's), for a micro-batch."""


class Part(NamedTuple):
    """One operation of a slot: its type, what it is (equal for all cells that take part), and its micro-batch."""

    optype: OpType
    key: tuple[object, ...]
    micro_batch: int
    owner: Cell
    """Whose seconds count: the sender's, or the first cell's."""


Slot = list[Part]


def one_f_one_b(cell: Cell, stages: int, micro_batches: int) -> list[Slot]:
    """What stock Megatron-core's schedule without interleaving does at a cell."""
    stage = cell.stage

    def compute(optype: OpType, number: int) -> Part:
        return Part(optype, (optype, cell, number), number, cell)

    def message(optype: OpType, number: int) -> list[Part]:
        assert optype.peer is not None
        other = stage + optype.peer[0]
        if not 0 <= other < stages:
            return []
        sends = optype in (OpType.FORWARD_SEND, OpType.BACKWARD_SEND)
        sender = cell if sends else Cell(cell.replica, other)
        return [Part(optype, ("message", sender, optype.value.split("-")[0], number), number, sender)]

    ahead = min(stages - 1 - stage, micro_batches)
    slots: list[Slot] = []
    for number in range(ahead):
        slots += [message(OpType.FORWARD_RECV, number), [compute(OpType.FORWARD, number)]]
        slots.append(message(OpType.FORWARD_SEND, number))
    if ahead < micro_batches:
        slots.append(message(OpType.FORWARD_RECV, ahead))
    for number in range(micro_batches - ahead):
        forward = number + ahead
        slots.append([compute(OpType.FORWARD, forward)])
        slots.append(message(OpType.FORWARD_SEND, forward) + message(OpType.BACKWARD_RECV, number))
        slots.append([compute(OpType.BACKWARD, number)])
        more = message(OpType.FORWARD_RECV, forward + 1) if forward + 1 < micro_batches else []
        slots.append(message(OpType.BACKWARD_SEND, number) + more)
    for number in range(micro_batches - ahead, micro_batches):
        slots += [message(OpType.BACKWARD_RECV, number), [compute(OpType.BACKWARD, number)]]
        slots.append(message(OpType.BACKWARD_SEND, number))
    return [slot for slot in slots if slot]


def recorded_step(
    number: int, replicas: int, stages: int, micro_batches: int, seconds: Seconds, *, delay_s: float = 0.0
) -> RecordedStep:
    """One step of a job whose replicas synchronise each stage's gradients, and then the norm of all of them.

    `delay_s`: what a host needs between two slots.
    """
    cells = [Cell(replica, stage) for replica in range(replicas) for stage in range(stages)]
    programs = {cell: one_f_one_b(cell, stages, micro_batches) for cell in cells}
    for cell in cells:
        reduction = Part(OpType.GRADS_REDUCE_SCATTER, ("sync", cell.stage), -1, Cell(0, cell.stage))
        programs[cell] += [[reduction], [Part(OpType.CLIP, ("clip",), -1, cells[0])]]
        programs[cell].append([Part(OpType.OPTIMIZER, ("optimizer", cell), -1, cell)])
    shared: dict[tuple[object, ...], int] = {}
    for program in programs.values():
        for part in (part for slot in program for part in slot):
            shared[part.key] = shared.get(part.key, 0) + 1
    return RecordedStep(number=number, operations=numbered(_run(programs, shared, seconds, delay_s)))


def _run(
    programs: dict[Cell, list[Slot]], shared: dict[tuple[object, ...], int], seconds: Seconds, delay_s: float
) -> list[Operation]:
    at = dict.fromkeys(programs, 0)
    free_s = dict.fromkeys(programs, 0.0)
    come_s: dict[tuple[object, ...], dict[Cell, float]] = {}
    operations: list[Operation] = []
    while any(at[cell] < len(program) for cell, program in programs.items()):
        before = dict(at)
        for cell, program in programs.items():
            if at[cell] == len(program):
                continue
            slot, begin_s = program[at[cell]], free_s[cell] + delay_s
            for part in slot:
                come_s.setdefault(part.key, {})[cell] = begin_s
            if any(len(come_s[part.key]) < shared[part.key] for part in slot):
                continue
            ends_s = [
                max(come_s[part.key].values()) + seconds(part.optype, part.owner, part.micro_batch) for part in slot
            ]
            for part in slot:
                computes = part.micro_batch if part.optype.computes else -1
                operations.append(Operation(cell, part.optype, begin_s, max(ends_s) - begin_s, 0, 0, computes))
            free_s[cell] = max(ends_s)
            at[cell] += 1
        assert at != before, "the programs wait for each other"
    return operations
