# SPDX-License-Identifier: Apache-2.0
"""Build the graph of a recorded step for replays: which events wait for which, and how long they take.

An *event* ends at the same time for all that take part in it: an action of one cell, a message (its send and its
receive), or a collective. A *taker* is one cell's part. It is ready when its cell's earlier events have ended, plus a
*launch delay* of the host. The event ends its *work* after the last taker is ready. So a recorded send or receive is
split into waiting, which a replay computes anew, and transfer, which it keeps: the part after the later of both
starts.

If sends and receives block, as in stock Megatron-core, a cell runs its operations in recorded order; those that
started together run side by side. If they overlap computation, the recorded order of computation stays, and the n-th
action that needs a message waits for the n-th one. Messages that were not recorded are inserted between the actions
that must have sent and used them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import (
    OVER_JOB,
    OVER_REPLICAS,
    OVER_STAGES,
    Operation,
    OpType,
    RecordedStep,
    ReplayError,
    ReplayMessage,
)

# Sends and receives of stock Megatron-core's schedules follow from the order of actions. Without overlap, a cell
# computes nothing while it exchanges messages. 1F1B exchanges between any two actions. Between a forward and a backward
# it sends and receives in one call, since both are with the same neighbour; between two of a kind it first sends, then
# receives. The interleaved schedule exchanges with both neighbours in one call: after each forward of the warm-up, each
# pair of forward and backward, and each backward at the end. A call ends with the last of its messages, and a message
# when both its ends are ready and it has been transferred.


class ReplayCall(NamedTuple):
    """Messages that a cell exchanges in one call, by their index in the step."""

    messages: tuple[int, ...]


Slot = Operation | ReplayCall
_KNOWN = (OpType.FORWARD, OpType.BACKWARD)
_Calls = dict[Operation | None, list[ReplayCall]]
"""Calls after each action; those before the first action at None."""


def programs_of(step: RecordedStep) -> dict[Cell, list[Slot]]:
    """Return each cell's operations and calls, in order. Raises ReplayError for orders that stock's schedules do not
    have."""
    sent = {each.sender: index for index, each in enumerate(step.messages)}
    used = {each.user: index for index, each in enumerate(step.messages)}
    chunks = 1 + max(each.chunk for each in step.operations)
    found: dict[Cell, list[Slot]] = {}
    for cell, operations in step.by_cell().items():
        actions = [each for each in operations if each.optype.computes]
        if any(each.optype not in _KNOWN for each in actions):
            raise ReplayError(f"step {step.number} has split backwards: stock's schedules have none")
        units = [[each] for each in actions] if chunks == 1 else _units(step, actions)
        calls = _calls_between(units, sent, used, apart=chunks == 1)
        program: list[Slot] = [*calls.get(None, [])]
        for operation in operations:
            program += [operation, *calls.get(operation, [])]
        found[cell] = program
    return found


def _units(step: RecordedStep, actions: Sequence[Operation]) -> list[list[Operation]]:
    """Return the groups of actions that the interleaved schedule computes between two exchanges."""
    forward = [each.optype is OpType.FORWARD for each in actions]
    warm_up = forward.index(False) - 1 if False in forward else len(forward)
    pairs = 0
    while forward[warm_up + 2 * pairs : warm_up + 2 * pairs + 2] == [True, False]:
        pairs += 1
    if pairs == 1 and 2 * (warm_up + 1) == len(forward):
        warm_up, pairs = warm_up + 1, 0  # as many micro-batches as stages: all forwards are warm-up
    rest = warm_up + 2 * pairs
    if any(forward[rest:]):
        raise ReplayError(f"step {step.number} has another order of actions than stock's interleaved schedule")
    return [
        *([each] for each in actions[:warm_up]),
        *([actions[at], actions[at + 1]] for at in range(warm_up, rest, 2)),
        *([each] for each in actions[rest:]),
    ]


def _calls_between(
    units: Sequence[Sequence[Operation]], sent: Mapping[Operation, int], used: Mapping[Operation, int], *, apart: bool
) -> _Calls:
    calls: _Calls = {}
    for before, after in pairwise([[], *units, []]):
        sends = [sent[each] for each in before if each in sent]
        receives = [used[each] for each in after if each in used]
        alike = apart and before and after and before[0].optype is after[0].optype
        groups = [sends, receives] if alike else [[*sends, *receives]]
        calls[before[-1] if before else None] = [ReplayCall(tuple(group)) for group in groups if group]
    return calls


_OVERLAP = 0.01
"""Messages count as non-blocking if they overlap more than this share of all computation,"""
_OF_MESSAGES = 0.2
"""or more than this share of the time of messages: quick ones never overlap much computation."""


_NOTHING_S = 1e-3
"""Shorter garbage collections are left out: whether they come before or after a message is chance."""


class Taker(NamedTuple):
    """One cell's part in an event."""

    cell: Cell
    before: tuple[int, ...]
    """Indices of events that have to end first; empty at the beginning of a step."""


class ReplayEvent(NamedTuple):
    """An event: a node that ends at the same time for all that wait for it. Steps with equal graphs differ only in
    times."""

    optype: OpType
    """Type; of a message, that of its send."""
    takers: tuple[Taker, ...]
    chunk: int = 0
    micro_batch: int = -1
    source: int = -1
    """Stage that sends the message; -1 for other events."""

    @property
    def link(self) -> tuple[int, int] | None:
        """Source and target stage of a message; None for other events."""
        if self.source < 0:
            return None
        return self.source, next(cell.stage for cell in self.cells if cell.stage != self.source)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(taker.cell for taker in self.takers)


@dataclass(frozen=True)
class StepGraph:
    """Events of a step, each after those it waits for. Steps with equal graphs can be replayed together."""

    events: tuple[ReplayEvent, ...]


class StepTimes(NamedTuple):
    """Times of one step, for its graph, in seconds."""

    delays_s: tuple[float, ...]
    """Launch delay of each taker of each event, in the order of the graph."""
    work_s: tuple[float, ...]
    """Duration of each event, from when the last taker is ready."""


_Key = tuple[str | int, ...]
"""Type, kind of event (see `_key`), replica, stage, and what distinguishes it from others."""


class _Draft(NamedTuple):
    """An event under construction: its operations, and the events that each waits for."""

    operations: list[Operation]
    before: list[tuple[_Key, ...]]
    ready_s: list[float]
    """For each operation: recorded end of its cell's earlier events."""


def graph_of(step: RecordedStep) -> tuple[StepGraph, StepTimes]:
    """Return the graph of `step` and its times.

    Raises ReplayError for a send without a receive, or operations that wait for each other.
    """
    if step.blocking is not None:
        return _with_found_messages(step)
    by_cell = {
        cell: [each for each in operations if each.optype is not OpType.GARBAGE or each.duration_s >= _NOTHING_S]
        for cell, operations in step.by_cell().items()
    }
    drafts: dict[_Key, _Draft] = {}
    blocking = blocks(by_cell.values())
    for operations in by_cell.values():
        lines = _blocking(operations) if blocking else _overlapping(operations, step.stages)
        for operation, before in lines:
            previous = list(map(_key, before))
            ready_s = max((each.end_s for each in before), default=step.start_s)
            draft = drafts.setdefault(_key(operation), _Draft([], [], []))
            draft.operations.append(operation)
            draft.before.append(tuple(previous))
            draft.ready_s.append(ready_s)
    return _assembled(step, drafts)


def _key(operation: Operation) -> _Key:
    """Return the key of an operation's event. Its second entry: 0 for one operation, 1 for a collective, 2 for a
    message."""
    (replica, stage), optype, sequence = operation.cell, operation.optype, operation.sequence
    if optype.peer is not None:
        # By the sender's stage; the link wraps around where stages hold several chunks, see `_joined_around`.
        sends = optype in (OpType.FORWARD_SEND, OpType.BACKWARD_SEND)
        sent, sender = (optype, stage) if sends else (optype.peer[1], stage + optype.peer[0])
        return (sent.value, 2, replica, sender, sequence)
    if optype in OVER_REPLICAS:
        return (optype.value, 1, -1, stage, sequence)
    if optype in OVER_STAGES:
        return (optype.value, 1, replica, -1, sequence)
    if optype in OVER_JOB:
        return (optype.value, 1, -1, -1, sequence)
    return (optype.value, 0, replica, stage, sequence)


def blocks(cells: Iterable[Sequence[Operation]]) -> bool:
    """Return whether cells wait for the end of each send and receive before they compute."""
    computed_s = overlapped_s = messages_s = 0.0
    for operations in cells:
        message_end_s = -math.inf
        for operation in operations:
            if operation.optype.peer is not None:
                message_end_s = max(message_end_s, operation.end_s)
                messages_s += operation.duration_s
            elif operation.optype.computes:
                computed_s += operation.duration_s
                overlapped_s += max(0.0, min(message_end_s, operation.end_s) - operation.start_s)
    return overlapped_s <= _OVERLAP * computed_s and overlapped_s <= _OF_MESSAGES * messages_s


_Lines = Iterable[tuple[Operation, Sequence[Operation]]]
"""Operations of a cell, each with the operations of the cell that come before it."""


def _blocking(operations: Sequence[Operation]) -> _Lines:
    previous: list[Operation] = []
    slot: list[Operation] = []
    for operation in operations:
        if not (slot and _batched(slot[0], operation)):
            previous, slot = slot, []
        slot.append(operation)
        yield operation, previous


def _batched(first: Operation, operation: Operation) -> bool:
    """Return whether two neighbours are sends and receives of one call. Recorded times may overlap a little anyway."""
    if first.optype.peer is None or operation.optype.peer is None:
        return False
    shorter_s = min(first.duration_s, operation.duration_s)
    return min(first.end_s, operation.end_s) - operation.start_s > 0.5 * shorter_s


def _overlapping(operations: Sequence[Operation], stages: int) -> _Lines:
    received = _Received(operations, stages)
    chain: list[Operation] = []
    for operation in operations:
        if operation.optype.peer is not None:
            over = (each for each in reversed(chain) if each.end_s <= operation.start_s)
            yield operation, [found] if (found := next(over, None)) is not None else []
        else:
            yield operation, [*chain[-1:], *received.needed_by(operation)]
            chain.append(operation)


class _Received:
    """Receives of a cell, for the actions that need them: by micro-batch if recorded, else in order."""

    def __init__(self, operations: Sequence[Operation], stages: int) -> None:
        self._stages = stages
        self._chunks = 1 + max((each.chunk for each in operations), default=0)
        self._named: dict[tuple[OpType, int, int], Operation] = {}
        self._in_order: dict[OpType, deque[Operation]] = {OpType.FORWARD_RECV: deque(), OpType.BACKWARD_RECV: deque()}
        for each in operations:
            if each.optype in self._in_order and each.micro_batch >= 0:
                self._named[each.optype, each.chunk, each.micro_batch] = each
            elif each.optype in self._in_order:
                self._in_order[each.optype].append(each)

    def needed_by(self, operation: Operation) -> list[Operation]:
        """Return the receive that `operation` needs, if any."""
        if operation.optype not in (OpType.FORWARD, OpType.BACKWARD, OpType.BACKWARD_INPUT):
            return []
        forward = operation.optype is OpType.FORWARD
        optype = OpType.FORWARD_RECV if forward else OpType.BACKWARD_RECV
        named = self._named.get((optype, operation.chunk, operation.micro_batch))
        if named is not None:
            return [named]
        ends = (0, 0) if forward else (self._chunks - 1, self._stages - 1)
        if (operation.chunk, operation.cell.stage) == ends or not self._in_order[optype]:
            return []
        return [self._in_order[optype].popleft()]


def _assembled(step: RecordedStep, drafts: dict[_Key, _Draft]) -> tuple[StepGraph, StepTimes]:
    drafts = _joined_around(step, drafts)
    # Sorted independently of the recorded times, so that equal steps have equal graphs.
    needed = {key: sorted({each for row in drafts[key].before for each in row}) for key in sorted(drafts)}
    order = _ordered(step, needed)
    number = {key: index for index, key in enumerate(order)}
    events, delays_s, work_s = [], [], []
    for key in order:
        operations, before, ready_s = drafts[key]
        _check_message(step, key, operations)
        takers = sorted(zip(operations, before, ready_s, strict=True), key=lambda taker: taker[0].cell)
        events.append(
            ReplayEvent(
                _named(operations),
                tuple(Taker(each.cell, tuple(sorted(number[one] for one in rows))) for each, rows, _ in takers),
                operations[0].chunk,
                operations[0].micro_batch,
                int(key[3]) if key[1] == 2 else -1,
            )
        )
        delays_s += [max(0.0, each.start_s - ready) for each, _, ready in takers]
        work_s.append(max(0.0, _end_s(operations) - max(each.start_s for each in operations)))
    return StepGraph(tuple(events)), StepTimes(tuple(delays_s), tuple(work_s))


def _ordered(step: RecordedStep, needed: Mapping[_Key, Sequence[_Key]]) -> list[_Key]:
    """Return all events, each after those it waits for."""
    try:
        return list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        circle = error.args[1]
        waits = [f"{_described(one)} comes before {_described(other)}" for one, other in pairwise(circle[:4])]
        raise ReplayError(
            f"operations of step {step.number} wait for each other: {', '.join(waits)}"
            f"{', and so on in a circle' if len(circle) > 4 else ''}. Their sends and receives cannot be matched by "
            "their order: is the recording of that step complete, and of one run?"
        ) from error


def _described(key: _Key) -> str:
    optype, _, replica, stage, sequence = key[:5]
    return f"{optype} {sequence} of cell {replica}.{stage}"


_Line = tuple[Cell, list[_Key], float]
"""A cell's part in an event: the events before it, and its start; NaN for a message, for which it is ready at once."""


def _with_found_messages(step: RecordedStep) -> tuple[StepGraph, StepTimes]:
    """Return the graph of a step whose messages are estimated, not recorded."""
    found = _Found(step)
    number = {key: index for index, key in enumerate(found.ready_s)}
    events, delays_s, work_s = [], [], []
    for key, ready_s in found.ready_s.items():
        message, takers = found.messages.get(key), found.lines[key]
        if message is None:
            operation, end_s = found.recorded[key]
            delays_s += [max(0.0, line[2] - each_s) for line, each_s in zip(takers, ready_s, strict=True)]
            work_s.append(max(0.0, end_s - max(start_s for _, _, start_s in takers)))
        else:
            operation = message.sender
            delays_s += [0.0] * len(takers)
            work_s.append(message.seconds)
        events.append(
            ReplayEvent(
                operation.optype if message is None else message.optype,
                tuple(Taker(cell, tuple(sorted(number[one] for one in before))) for cell, before, _ in takers),
                operation.chunk,
                operation.micro_batch,
                -1 if message is None else message.link[0],
            )
        )
    return StepGraph(tuple(events)), StepTimes(tuple(delays_s), tuple(work_s))


def misfit_s(step: RecordedStep) -> float:
    """Return the sum over actions of the seconds between their start and the end of what they waited for, for
    estimated messages. Raises ReplayError as `graph_of`."""
    found = _Found(step)
    return math.fsum(
        abs(start_s - each_s)
        for key, ready_s in found.ready_s.items()
        if key in found.recorded and found.recorded[key][0].optype.computes
        for (_, _, start_s), each_s in zip(found.lines[key], ready_s, strict=True)
    )


class _Found:
    """Events of a step with estimated messages, in order, and when each taker was ready."""

    def __init__(self, step: RecordedStep) -> None:
        self.lines, self.recorded = _lines_around_messages(step)
        needed = {
            key: sorted({one for _, before, _ in self.lines[key] for one in before}) for key in sorted(self.lines)
        }
        self.messages = {_message_key(each): each for each in step.messages}
        self.ready_s: dict[_Key, list[float]] = {}
        ends_s: dict[_Key, float] = {}
        for key in _ordered(step, needed):
            self.lines[key].sort(key=lambda line: line[0])
            ready_s = [max((ends_s[one] for one in before), default=step.start_s) for _, before, _ in self.lines[key]]
            message = self.messages.get(key)
            ends_s[key] = self.recorded[key][1] if message is None else max(ready_s) + message.seconds
            self.ready_s[key] = ready_s


def _message_key(message: ReplayMessage) -> _Key:
    sender = message.sender
    return (message.optype.value, 2, *sender.cell, sender.chunk, sender.micro_batch)


def _lines_around_messages(step: RecordedStep) -> tuple[dict[_Key, list[_Line]], dict[_Key, tuple[Operation, float]]]:
    """Return the takers of each event and, for recorded ones, an operation and the end."""
    lines: dict[_Key, list[_Line]] = {}
    lasts_s: dict[_Key, tuple[Operation, float]] = {}
    keys = [_message_key(each) for each in step.messages]
    needed = {each.user: key for each, key in zip(step.messages, keys, strict=True)}
    if not step.blocking:
        for each, key in zip(step.messages, keys, strict=True):
            lines[key] = [(each.sender.cell, [_key(each.sender)], math.nan), (each.user.cell, [], math.nan)]
    for cell, program in (programs_of(step) if step.blocking else step.by_cell()).items():
        before: list[_Key] = []
        for slot in program:
            if isinstance(slot, ReplayCall):
                for index in slot.messages:
                    lines.setdefault(keys[index], []).append((cell, before, math.nan))
                before = [keys[index] for index in slot.messages]
            elif slot.optype is not OpType.GARBAGE or slot.duration_s >= _NOTHING_S:
                key = _key(slot)
                waits = [*before, *([needed[slot]] if not step.blocking and slot in needed else [])]
                lines.setdefault(key, []).append((cell, waits, slot.start_s))
                lasts_s[key] = slot, min(slot.end_s, lasts_s[key][1] if key in lasts_s else math.inf)
                before = [key]
    return lines, lasts_s


def _end_s(operations: Sequence[Operation]) -> float:
    """Return the end of an event. A batch of messages ends for its cell with the last of them, so the earlier end
    counts."""
    return min(each.end_s for each in operations)


def _named(operations: Sequence[Operation]) -> OpType:
    sends = (each.optype for each in operations if each.optype in (OpType.FORWARD_SEND, OpType.BACKWARD_SEND))
    return next(sends, operations[0].optype)


def _check_message(step: RecordedStep, key: _Key, operations: Sequence[Operation]) -> None:
    if key[1] == 2 and len(operations) != 2:
        raise ReplayError(
            f"step {step.number}: {operations[0]} has {len(operations) - 1} other ends, not 1: leave the step out, or "
            "record all stages of the replica"
        )


def _joined_around(step: RecordedStep, drafts: dict[_Key, _Draft]) -> dict[_Key, _Draft]:
    """Merge the two ends of messages that wrap around between last and first stage, under the sending stage."""

    def around(key: _Key) -> _Key:
        return (*key[:3], int(key[3]) % step.stages, key[4]) if key[1] == 2 else key

    joined: dict[_Key, _Draft] = {}
    for key, draft in drafts.items():
        found = joined.setdefault(around(key), _Draft([], [], []))
        found.operations.extend(draft.operations)
        found.before.extend(tuple(map(around, row)) for row in draft.before)
        found.ready_s.extend(draft.ready_s)
    return joined
