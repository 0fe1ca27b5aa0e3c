# SPDX-License-Identifier: Apache-2.0
"""Recordings of made-up jobs: stock's 1F1B with sends and receives that block, run by a slow, obvious simulation.

Every cell runs a list of slots. What is in a slot begins together; each part needs all cells that share its key, and
ends its own time after the last of them has come; the cell goes on when all parts of the slot are over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, with_sequence_numbers

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


def interleaved(chunks: int) -> Callable[[Cell, int, int], list[Slot]]:
    """What stock's interleaved schedule does at a cell: one call exchanges all messages with both neighbours. Chunks
    are in the thousands of micro-batches."""

    def program(cell: Cell, stages: int, micro_batches: int) -> list[Slot]:
        count, last = chunks * micro_batches, chunks * stages - 1
        turns = [
            (chunk, group * stages + index)
            for group in range(micro_batches // stages)
            for chunk in range(chunks)
            for index in range(stages)
        ]
        work = {
            OpType.FORWARD: [(chunk * stages + cell.stage, number) for chunk, number in turns],
            OpType.BACKWARD: [((chunks - 1 - chunk) * stages + cell.stage, number) for chunk, number in turns],
        }
        ahead = min(2 * (stages - cell.stage - 1) + (chunks - 1) * stages, count)
        units = [[(OpType.FORWARD, at)] for at in range(ahead)]
        units += [[(OpType.FORWARD, at), (OpType.BACKWARD, at - ahead)] for at in range(ahead, count)]
        units += [[(OpType.BACKWARD, at)] for at in range(count - ahead, count)]

        def message(optype: OpType, at: int, *, sends: bool) -> list[Part]:
            virtual, number = work[optype][at]
            step = 1 if optype is OpType.FORWARD else -1
            sender = virtual if sends else virtual - step
            if not (0 <= sender <= last and 0 <= sender + step <= last):
                return []
            forward = optype is OpType.FORWARD
            kinds = (
                (OpType.FORWARD_SEND, OpType.FORWARD_RECV) if forward else (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV)
            )
            owner = Cell(cell.replica, sender % stages)
            return [Part(kinds[0] if sends else kinds[1], ("message", optype, sender, number), number, owner)]

        slots: list[Slot] = [message(OpType.FORWARD, 0, sends=False)]
        for index, unit in enumerate(units):
            for optype, at in unit:
                virtual, number = work[optype][at]
                place = 1000 * (virtual // stages) + number
                slots.append([Part(optype, (optype, virtual, number), place, cell)])
            following = units[index + 1] if index + 1 < len(units) else []
            sent = [part for optype, at in unit for part in message(optype, at, sends=True)]
            slots.append(sent + [part for optype, at in following for part in message(optype, at, sends=False)])
        return [slot for slot in slots if slot]

    return program


def played(programs: dict[Cell, list[Slot]], seconds: Seconds, delay_s: float = 0.0) -> list[Operation]:
    """What each cell did when. `delay_s`: what a host needs between two slots."""
    shared: dict[tuple[object, ...], int] = {}
    for program in programs.values():
        for part in (part for slot in program for part in slot):
            shared[part.key] = shared.get(part.key, 0) + 1
    return _run(programs, shared, seconds, delay_s)


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
    return RecordedStep(number=number, operations=with_sequence_numbers(played(programs, seconds, delay_s)))


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
