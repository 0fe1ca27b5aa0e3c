# SPDX-License-Identifier: Apache-2.0
"""When stock Megatron-core's schedules send and receive, told from the order of their actions.

Without overlap, a cell computes nothing while it exchanges messages. 1F1B exchanges between any two actions: from a
forward to a backward, or back, it sends and receives in one call, since both are with the same neighbour; between two
of a kind it first sends, then receives. The interleaved schedule exchanges with both neighbours in one call, after each
forward of the warm-up, each pair of forward and backward, and each backward at the end. A call is over when all its
messages are, and a message when both its ends have come to it and it has been transferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.schedule.replay.operations import Operation, OpType, RecordedStep, ReplayError
from adaptra_megatron.schedule.routing.costs import Cell


class Call(NamedTuple):
    """What a cell exchanges at once, by the messages' places in the step."""

    messages: tuple[int, ...]


Slot = Operation | Call
_KNOWN = (OpType.FORWARD, OpType.BACKWARD)
_Calls = dict[Operation | None, list[Call]]
"""The calls after each action; those before the first one at None."""


def programs_of(step: RecordedStep) -> dict[Cell, list[Slot]]:
    """What each cell does, in order. Raises ReplayError for orders that stock's schedules do not have."""
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
    """What the interleaved schedule computes between two exchanges."""
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
        calls[before[-1] if before else None] = [Call(tuple(group)) for group in groups if group]
    return calls
