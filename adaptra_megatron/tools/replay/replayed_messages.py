# SPDX-License-Identifier: Apache-2.0
"""Estimate messages of recordings with computation alone: which messages there were, and their transfer times.

Two hypotheses are compared by how well they explain the starts of actions. If messages overlap computation, a stage
that waited for a message began when it arrived. A message that arrived earlier is assumed to be as quick as others of
its link, as far as there was time.

If exchanges block, as in stock Megatron-core, everybody waits for one slow link, and most gaps are longer than any
message of their own. So a link gets the time of its quickest messages, with as few slow links as possible: one is
added while it explains more than all others do. A single message gets more only if both its ends continued later than
that explains.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import (
    SENDING,
    Operation,
    OpType,
    RecordedStep,
    ReplayError,
    ReplayMessage,
)
from adaptra_megatron.tools.replay.replay_graph import ReplayCall, Slot, misfit_s, programs_of

_QUICK = 0.05
"""Share of a link's messages that may be quicker than the link's time, since clocks are read a little late."""
_ROUNDS = 3
"""Iterations after which the times of calls that depend on each other have converged."""
_LITTLE = 0.02
"""Share of an action by which a link must be slower than others to count as slow."""
_EXPLAINS = 0.5
"""A slow link must explain starts of actions by at least this share of one of its messages,"""
_EXPLAINS_OF_REST = 0.02
"""and by this share of all that is not explained yet."""
_SLOWER = 2.0
"""A message may take at most this many times as long as any that was certainly waited for."""
_SAMPLE = 6
"""Number of steps, and of replicas, that decide whether exchanges block."""
_CLEARLY = 0.95
"""Blocking exchanges must have a misfit below this share of the other hypothesis'."""

Link = tuple[int, int, int]
"""Replica, and the stages of both ends."""


def with_messages(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the steps of one job with the messages that their actions must have sent; recorded messages stay as they
    are.

    Raises ReplayError for a step whose stages hold different numbers of chunks.
    """
    bare = [index for index, step in enumerate(steps) if not any(each.optype.peer for each in step.operations)]
    found = list(steps)
    for index in bare:
        found[index] = replace(steps[index], messages=tuple(pairs_of(steps[index])), blocking=False)
    sample = [found[index] for index in bare[:: -(-len(bare) // _SAMPLE) or 1]]
    blocking = _block(sample)
    for index in bare:
        found[index] = _blocking(found[index])[1] if blocking else _overlapping(found[index])
    return found


def pairs_of(step: RecordedStep) -> Iterator[ReplayMessage]:
    """Yield the messages that the actions of `step` must have sent, with 0 seconds. Raises ReplayError for a step
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
            yield ReplayMessage(operation, users[key], 0.0)


def _block(sample: Sequence[RecordedStep]) -> bool:
    """Return whether the job's exchanges block, as stock's do."""
    overlapping_s = blocking_s = 0.0
    for step in map(_of_some_replicas, sample):
        if not step.messages:
            continue
        try:
            blocking_s += sum(map(misfit_s, _blocking(step)))
        except ReplayError:
            return False
        overlapping_s += sum(misfit_s(_overlapping(step, even=even)) for even in (True, False))
    return blocking_s < _CLEARLY * overlapping_s


def _of_some_replicas(step: RecordedStep) -> RecordedStep:
    replicas = sorted({cell.replica for cell in step.cells})
    some = set(replicas[:: -(-len(replicas) // _SAMPLE)])
    if len(some) == len(replicas):
        return step
    return replace(
        step,
        operations=tuple(each for each in step.operations if each.cell.replica in some),
        messages=tuple(each for each in step.messages if each.sender.cell.replica in some),
    )


def _link(message: ReplayMessage) -> Link:
    return message.sender.cell.replica, *message.link


def _little_s(step: RecordedStep) -> float:
    """Return the seconds within which actions or links count as equal."""
    return _LITTLE * statistics.median([each.duration_s for each in step.operations if each.optype.computes] or [0.0])


def _quick_s(rows: Mapping[Link, list[float]]) -> dict[Link, float]:
    """Return the seconds of the quickest messages of each link."""
    return {link: sorted(row)[int(_QUICK * len(row))] for link, row in rows.items() if row}


def _overlapping(step: RecordedStep, *, even: bool = False) -> RecordedStep:
    """Return `step` with the seconds of messages that overlap computation. `even`: all messages of a link are equal."""
    ready_s: dict[Operation, float] = {}
    """Time at which a cell had nothing left to do but the action that needs the message."""
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
    slowest_s = {} if even else {link: _SLOWER * max(row) for link, row in rows.items()}
    little_s = _little_s(step)

    def seconds(message: ReplayMessage, room_s: float, was_waited_for: bool) -> float:
        if was_waited_for and not even:
            return room_s
        # If the user was free while the message was in transit, it waited, unless no message of this link takes so
        # long.
        waited_s = message.user.start_s - ready_s[message.user]
        if waited_s > little_s and room_s <= slowest_s.get(_link(message), 0.0):
            return room_s
        return min(room_s, usual_s.get(_link(message), 0.0))

    found = [
        message._replace(seconds=seconds(message, room_s, was_waited_for))
        for message, room_s, was_waited_for in zip(step.messages, rooms_s, waited, strict=True)
    ]
    return replace(step, messages=tuple(found), blocking=False)


def _blocking(step: RecordedStep) -> tuple[RecordedStep, RecordedStep]:
    """Return `step` with the seconds of messages that block, as in stock Megatron-core: with all messages of a link
    equal, and with longer ones.

    Raises ReplayError for orders that stock does not have.
    """
    programs = programs_of(step)
    little_s = _little_s(step)
    even: dict[int, float] = {}
    longer: dict[int, float] = {}
    for replica in {cell.replica for cell in programs}:
        calls = _Exchanges(step, {cell: program for cell, program in programs.items() if cell.replica == replica})
        found = calls.of_links(_fewest_slow_links(calls, little_s))
        even |= found
        longer |= calls.extended(found, little_s)
    return _exchanged(step, even), _exchanged(step, longer)


def _exchanged(step: RecordedStep, seconds: Mapping[int, float]) -> RecordedStep:
    found = [message._replace(seconds=seconds.get(index, 0.0)) for index, message in enumerate(step.messages)]
    return replace(step, messages=tuple(found), blocking=True)


def _fewest_slow_links(calls: _Exchanges, little_s: float) -> dict[Link, float]:
    """Return the seconds of each link's messages, with as few links slower than the quickest as explain the starts of
    actions. Cells wait for each other, so one slow link leaves room for others to be slow, too."""
    most_s = calls.quickest({})
    if not most_s:
        return {}
    least_s = min(most_s.values())
    usual_s = {link: min(each_s, least_s + little_s) for link, each_s in most_s.items()}
    slow: set[Link] = set()
    maybe = {link for link, each_s in most_s.items() if each_s > usual_s[link]}
    found, misfit_s = usual_s, calls.misfit_s(usual_s)
    while maybe:
        trials = {}
        for link in sorted(maybe):
            trial = calls.quickest({one: usual_s[one] for one in most_s if one != link and one not in slow})
            trials[link] = (calls.misfit_s(trial), trial)
        best = min(trials, key=lambda link: trials[link][0])
        gained_s = misfit_s - trials[best][0]
        if gained_s < max(_EXPLAINS * (trials[best][1][best] - least_s), _EXPLAINS_OF_REST * misfit_s, little_s):
            break
        misfit_s, found = trials[best]
        slow.add(best)
        maybe.discard(best)
    return found


class _Exchanges:
    """The calls of a replica: when each end is ready for a message, and when it continued."""

    def __init__(self, step: RecordedStep, programs: Mapping[Cell, Sequence[Slot]]) -> None:
        self._after: dict[int, list[tuple[float, ReplayCall | None]]] = defaultdict(list)
        """For both ends of each message: when its cell was ready, or the call before it."""
        self._calls: list[tuple[ReplayCall, float]] = []
        """Calls, each with the time at which its cell continued; infinite if unknown."""
        self._of: dict[int, list[int]] = defaultdict(list)
        """The calls of both ends of each message."""
        for program in programs.values():
            before: tuple[float, ReplayCall | None] = (step.start_s, None)
            for index, slot in enumerate(program):
                if not isinstance(slot, ReplayCall):
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
            for message, ends in self._after.items()
        }
        try:
            self._order = list(TopologicalSorter(earlier).static_order())
        except CycleError as error:
            raise ReplayError(f"exchanges of step {step.number} wait for each other") from error
        self._links = {message: _link(step.messages[message]) for message in self._order}

    def of_links(self, seconds: Mapping[Link, float]) -> dict[int, float]:
        """Return the seconds of each message, by its index."""
        return {message: seconds.get(link, 0.0) for message, link in self._links.items()}

    def _ends(self, seconds: Mapping[int, float]) -> tuple[dict[int, float], dict[int, float]]:
        """Return by message when both ends were ready, and when it ended."""
        come_s: dict[int, float] = {}
        ends_s: dict[int, float] = {}
        for message in self._order:
            come_s[message] = max(
                at_s if call is None else max(ends_s[one] for one in call.messages)
                for at_s, call in self._after[message]
            )
            ends_s[message] = come_s[message] + seconds[message]
        return come_s, ends_s

    def quickest(self, known_s: Mapping[Link, float]) -> dict[Link, float]:
        """Return the longest time that each link can take. `known_s`: links with a known time."""
        found: dict[Link, float] = dict(known_s)
        for _ in range(_ROUNDS):
            come_s, _ = self._ends(self.of_links(found))
            rows: dict[Link, list[float]] = defaultdict(list)
            for message, link in self._links.items():
                went_on_s = min(self._calls[call][1] for call in self._of[message])
                if link not in known_s and went_on_s < math.inf:
                    rows[link].append(max(0.0, went_on_s - come_s[message]))
            found = {**known_s, **_quick_s(rows)}
        return found

    def misfit_s(self, seconds: Mapping[Link, float]) -> float:
        """Return the sum of the seconds between the end of each call and the time at which its cell continued."""
        _, ends_s = self._ends(self.of_links(seconds))
        return math.fsum(
            abs(went_on_s - max(ends_s[one] for one in call.messages))
            for call, went_on_s in self._calls
            if went_on_s < math.inf
        )

    def extended(self, seconds: Mapping[int, float], little_s: float) -> dict[int, float]:
        """Return `seconds`, increased for a message that ends both its calls if both ends continued later than that
        explains."""
        found = dict(seconds)
        for _ in range(_ROUNDS):
            come_s, _ = self._ends(found)
            lasts_s = [max(come_s[one] + seconds[one] for one in call.messages) for call, _ in self._calls]
            found = dict(seconds)
            for message, calls in self._of.items():
                went_on_s = min(self._calls[call][1] for call in calls)
                last = all(come_s[message] + seconds[message] > lasts_s[call] - little_s for call in calls)
                if last and math.inf > went_on_s > little_s + max(lasts_s[call] for call in calls):
                    found[message] = went_on_s - come_s[message]
        return found
