# SPDX-License-Identifier: Apache-2.0
"""Messages of recordings that have computation alone: which there were, and how long each was under way.

Two kinds of job are told apart by which of them explains when actions began, if all messages of a link take equally
long. Where messages overlap computation, a stage that waited for one began the moment it came; a message that came
before it was needed is taken for as quick as the others of its link usually are, as far as there was time for that.
Where exchanges block, as in stock Megatron-core, everybody waits for one slow link, and most gaps are longer than any
message of their own: a link takes what its quickest messages take, and a single message more only where both its ends
waited for longer and nothing else explains that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from adaptra_megatron.schedule.replay.exchanges import Call, programs_of
from adaptra_megatron.schedule.replay.graph import misfit_s
from adaptra_megatron.schedule.replay.operations import SENDING, Message, Operation, OpType, RecordedStep, ReplayError
from adaptra_megatron.schedule.routing.costs import Cell

_QUICK = 0.05
"""Share of a link's messages that may be quicker than what the link is said to take: clocks are read a little late."""
_ROUNDS = 3
"""Rounds after which calls, whose ends hang on each other, have found their times."""
_SAMPLE = 6
"""Steps that decide whether exchanges block."""
_CLEARLY = 0.95
"""Blocking exchanges have to explain the starts of actions this much better."""

Link = tuple[int, int, int]
"""Replica, and the stages of both ends."""


def with_messages(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The steps of one job, each with the messages that its actions must have had; with recorded ones, as they are.

    Raises ReplayError for a step whose stages hold different numbers of chunks.
    """
    bare = [index for index, step in enumerate(steps) if not any(each.optype.peer for each in step.operations)]
    found = list(steps)
    for index in bare:
        found[index] = replace(steps[index], messages=tuple(pairs_of(steps[index])), blocking=False)
    sample = [found[index] for index in bare[:: -(-len(bare) // _SAMPLE) or 1]]
    blocking = _block(sample)
    for index in bare:
        found[index] = _blocking(found[index]) if blocking else _overlapping(found[index])
    return found


def pairs_of(step: RecordedStep) -> Iterator[Message]:
    """The messages that the actions of `step` must have had, without their seconds. Raises ReplayError for a step
    whose stages hold different numbers of chunks."""
    users = {
        (each.cell, each.optype is OpType.FORWARD, each.chunk, each.micro_batch): each
        for each in step.operations
        if each.optype in SENDING
    }
    placement = step.placement
    for operation in step.operations:
        if operation.optype not in SENDING:
            continue
        forward = operation.optype is OpType.FORWARD
        try:
            place = (placement.next_place if forward else placement.previous_place)(
                operation.cell.stage, operation.chunk
            )
        except KeyError as error:
            raise ReplayError(
                f"step {step.number}: stage {operation.cell.stage} has no chunk {operation.chunk} in a pipeline of "
                f"{placement.stages} stages x {placement.chunks} chunks: is the recording of that step complete?"
            ) from error
        if place is None or place.stage == operation.cell.stage:
            continue
        key = (Cell(operation.cell.replica, place.stage), forward, place.chunk, operation.micro_batch)
        if key in users:
            yield Message(operation, users[key], 0.0)


def _block(sample: Sequence[RecordedStep]) -> bool:
    """Return whether the job's exchanges are stock's, which block."""
    overlapping_s = blocking_s = 0.0
    for step in sample:
        if not step.messages:
            continue
        try:
            blocking_s += misfit_s(_blocking(step, even=True))
        except ReplayError:
            return False
        overlapping_s += misfit_s(_overlapping(step, even=True))
    return blocking_s < _CLEARLY * overlapping_s


def _link(message: Message) -> Link:
    return message.sender.cell.replica, *message.link


def _quick_s(rows: Mapping[Link, list[float]]) -> dict[Link, float]:
    """What the quickest messages of each link take."""
    return {link: sorted(row)[int(_QUICK * len(row))] for link, row in rows.items() if row}


def _overlapping(step: RecordedStep, *, even: bool = False) -> RecordedStep:
    """`step` with the seconds of its messages, which are sent and received beside computation. `even`: each as quick
    as its link."""
    ready_s: dict[Operation, float] = {}
    """Since when a cell had nothing else to do than the action that needs the message."""
    for operations in step.by_cell().values():
        over_s = step.start_s
        for operation in operations:
            ready_s[operation] = over_s
            over_s = max(over_s, operation.end_s)
    rooms_s = [max(0.0, each.user.start_s - each.sender.end_s) for each in step.messages]
    waited = [ready_s[each.user] <= each.sender.end_s for each in step.messages]
    rows: dict[Link, list[float]] = defaultdict(list)
    for message, room_s, was_waited_for in zip(step.messages, rooms_s, waited, strict=True):
        if was_waited_for:
            rows[_link(message)].append(room_s)
    quick_s = _quick_s(rows)
    usual_s = quick_s if even else {link: statistics.median(row) for link, row in rows.items()}
    found = [
        message._replace(
            seconds=room_s if was_waited_for and not even else min(room_s, usual_s.get(_link(message), 0.0))
        )
        for message, room_s, was_waited_for in zip(step.messages, rooms_s, waited, strict=True)
    ]
    return replace(step, messages=tuple(found), blocking=False)


def _blocking(step: RecordedStep, *, even: bool = False) -> RecordedStep:
    """`step` with the seconds of its messages, which are exchanged as stock Megatron-core does. `even`: as above.

    Raises ReplayError for orders that stock does not have.
    """
    calls = _Exchanges(step)
    seconds = [0.0] * len(step.messages)
    for _ in range(_ROUNDS):
        bounds_s = calls.bounds(seconds)
        rows: dict[Link, list[float]] = defaultdict(list)
        for message, bound_s in zip(step.messages, bounds_s, strict=True):
            if bound_s < math.inf:
                rows[_link(message)].append(bound_s)
        quick_s = _quick_s(rows)
        seconds = [
            min(quick_s.get(_link(message), 0.0), bound_s)
            for message, bound_s in zip(step.messages, bounds_s, strict=True)
        ]
    if not even:
        seconds = calls.extended(seconds)
    found = [message._replace(seconds=each_s) for message, each_s in zip(step.messages, seconds, strict=True)]
    return replace(step, messages=tuple(found), blocking=True)


class _Exchanges:
    """The calls of a step: when each end comes to a message, and when it went on."""

    def __init__(self, step: RecordedStep) -> None:
        count = len(step.messages)
        self._after: list[list[tuple[float, Call | None]]] = [[] for _ in range(count)]
        """For both ends of each message: when it came there, or the call it came from."""
        self._calls: list[tuple[Call, float]] = []
        """With the moment at which its cell went on, infinity where that is not known."""
        self._of: list[list[int]] = [[] for _ in range(count)]
        """The calls of both ends."""
        for program in programs_of(step).values():
            before: tuple[float, Call | None] = (step.start_s, None)
            for index, slot in enumerate(program):
                if not isinstance(slot, Call):
                    before = (slot.end_s, None)
                    continue
                then = program[index + 1] if index + 1 < len(program) else None
                for message in slot.messages:
                    self._after[message].append(before)
                    self._of[message].append(len(self._calls))
                self._calls.append((slot, then.start_s if isinstance(then, Operation) else math.inf))
                before = (-math.inf, slot)
        earlier = {
            message: [one for _, call in ends if call is not None for one in call.messages]
            for message, ends in enumerate(self._after)
        }
        try:
            self._order = list(TopologicalSorter(earlier).static_order())
        except CycleError as error:
            raise ReplayError(f"exchanges of step {step.number} wait for each other") from error

    def _ends(self, seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        """When both ends of each message had come, and when it was over."""
        come_s, ends_s = [0.0] * len(seconds), [0.0] * len(seconds)
        for message in self._order:
            come_s[message] = max(
                at_s if call is None else max(ends_s[one] for one in call.messages)
                for at_s, call in self._after[message]
            )
            ends_s[message] = come_s[message] + seconds[message]
        return come_s, ends_s

    def bounds(self, seconds: Sequence[float]) -> list[float]:
        """The longest that each message can have taken."""
        come_s, _ = self._ends(seconds)
        return [
            max(0.0, min(self._calls[call][1] for call in self._of[message]) - come_s[message])
            for message in range(len(seconds))
        ]

    def extended(self, seconds: Sequence[float]) -> list[float]:
        """`seconds`, and more for the slowest message of calls whose both ends went on later than that explains."""
        come_s, ends_s = self._ends(seconds)
        lasts_s = [max(ends_s[one] for one in call.messages) for call, _ in self._calls]
        slowest_s = [max(seconds[one] for one in call.messages) for call, _ in self._calls]
        found = list(seconds)
        for message, calls in enumerate(self._of):
            went_on_s = min(self._calls[call][1] for call in calls)
            late = all(went_on_s > lasts_s[call] for call in calls)
            if late and went_on_s < math.inf and all(seconds[message] >= slowest_s[call] for call in calls):
                found[message] = went_on_s - come_s[message]
        return found
