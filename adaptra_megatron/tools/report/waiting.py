# SPDX-License-Identifier: Apache-2.0
"""Find why a stage was idle, at each instant of an iteration.

A waiting stage waits for a message. Once that is sent, the link is the cause. Before, the cause is the sender if it
computes, or else the cause for which the sender waits. Stages never wait in a circle, so each idle instant leads to a
link, a computing stage, another replica that micro-batches are routed through, or the end of the pipeline's work.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from adaptra_megatron.schedule.ir import Place, interleaved
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.tools.recordings.run_files import iteration_span_s


class CauseKind(str, enum.Enum):
    """Kind of cause of an idle stage."""

    LINK = "link"
    """A message was in transit."""
    STAGE = "stage"
    """Another stage was computing what is needed first: due to the order of actions, or a slow stage."""
    REPLICA = "replica"
    """Another replica's cell had to send a routed micro-batch; its own cause is not examined."""
    OVERHEAD = "overhead"
    """Nothing was missing: time between actions of some stage, for Python, copies or the operating system."""
    NO_WORK = "no work"
    """The stage had run all of its actions."""


class Cause(NamedTuple):
    """The link or stage that a stage waited for. `source` and `target`: a link's ends; `source` alone: a stage."""

    kind: CauseKind
    source: int = -1
    target: int = -1


class WaitingPhase(str, enum.Enum):
    """The part of a stage's iteration in which an idle period lies."""

    START = "start"
    """Before its first action."""
    MIDDLE = "middle"
    END = "end"
    """After its last action."""


class IdlePeriod(NamedTuple):
    """Idle time of one stage with one cause, on the clock of the records."""

    stage: int
    start_s: float
    end_s: float
    phase: WaitingPhase
    cause: Cause

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Flight(NamedTuple):
    """One message of one directed link."""

    source: int
    target: int
    kind: str
    """"F" for an activation, "B" for a gradient."""
    chunk: int
    """Chunk of the action that used the message."""
    micro_batch: int
    sent_s: float
    arrived_s: float

    @property
    def seconds(self) -> float:
        return self.arrived_s - self.sent_s


class _Piece(NamedTuple):
    """A period of a stage's time, from `start_s` to `end_s`. A stage's periods cover the iteration without gap."""

    start_s: float
    end_s: float
    awaited: ActionRecord | None
    """The action whose message the stage waited for; None if it computed, or was `idle` with all messages there."""
    idle: bool


_MessageKey = tuple[str, int, int, int]
"""Kind ("F" or "B"), stage and chunk of the user, micro-batch."""


class IterationAnalysis:
    """One training iteration of one pipeline: idle periods with their causes, and times of messages.

    `records`: of every stage, one rank per stage, on a common clock. `arrivals` may be empty: then a message counts as
    arrived when the waiting stage continued, and one that no stage waited for is left out. Raises ValueError if a
    stage between the first and the last has no records.
    """

    def __init__(self, records: Sequence[ActionRecord], arrivals: Iterable[ArrivalRecord] = ()) -> None:
        self.start_s, self.end_s = iteration_span_s(records)
        self.stages = 1 + max(record.stage for record in records)
        self.chunks = 1 + max(record.chunk for record in records)
        self._by_stage: dict[int, list[ActionRecord]] = defaultdict(list)
        for record in records:
            self._by_stage[record.stage].append(record)
        missing = set(range(self.stages)) - set(self._by_stage)
        if missing:
            raise ValueError(f"no records of stages {sorted(missing)}: the iteration cannot be analysed")
        self._senders = {
            (record.stage, _message_kind(record.kind), record.chunk, record.micro_batch): record
            for record in records
            if record.kind != "W"
        }
        self._arrived_s: dict[_MessageKey, float] = {
            (arrival.kind, arrival.stage, arrival.chunk, arrival.micro_batch): arrival.arrived_s for arrival in arrivals
        }
        self._pieces = {stage: list(self._stage_pieces(stage)) for stage in range(self.stages)}
        self._starts_s = {stage: [piece.start_s for piece in pieces] for stage, pieces in self._pieces.items()}

    @property
    def seconds(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return self.end_s - self.start_s

    def idle_periods(self) -> list[IdlePeriod]:
        """Return the idle periods of all stages, by stage and time. With the computations, they cover the iteration
        exactly."""
        found: list[IdlePeriod] = []
        for stage, records in sorted(self._by_stage.items()):
            first_s, last_s = records[0].start_s, records[-1].end_s
            for piece in self._pieces[stage]:
                if not piece.idle:
                    continue
                phase = WaitingPhase.MIDDLE
                if piece.end_s <= first_s:
                    phase = WaitingPhase.START
                elif piece.start_s >= last_s:
                    phase = WaitingPhase.END
                if phase is WaitingPhase.END:
                    found.append(IdlePeriod(stage, piece.start_s, piece.end_s, phase, Cause(CauseKind.NO_WORK)))
                    continue
                for start_s, end_s, cause in _merged(self._causes(stage, piece, piece.start_s, piece.end_s)):
                    found.append(IdlePeriod(stage, start_s, end_s, phase, cause))
        return found

    def compute_s(self) -> list[dict[str, float]]:
        """Return the seconds by kind of action, per stage."""
        totals: list[dict[str, float]] = [defaultdict(float) for _ in range(self.stages)]
        for stage, records in self._by_stage.items():
            for record in records:
                totals[stage][record.kind] += record.compute_s
        return totals

    def flights(self) -> list[Flight]:
        """Return the messages between stages with a known arrival, in the order in which they were sent."""
        found = []
        for records in self._by_stage.values():
            for record in records:
                sender = self._sender(record)
                if sender is None:
                    continue
                kind = _message_kind(record.kind)
                arrived_s = self._arrived_s.get((kind, record.stage, record.chunk, record.micro_batch))
                if arrived_s is None and record.wait_start_s <= sender.end_s:
                    arrived_s = record.start_s
                if arrived_s is not None:
                    # A message may be handed over a moment before the sender notes the end of its action.
                    sent_s = min(sender.end_s, arrived_s)
                    ends = sender.stage, record.stage
                    found.append(Flight(*ends, kind, record.chunk, record.micro_batch, sent_s, arrived_s))
        return sorted(found, key=lambda flight: flight.sent_s)

    def _sender(self, record: ActionRecord) -> ActionRecord | None:
        """Return the action of another stage that sent what `record` needed; None if it needed no message, or another
        replica's cell sent it."""
        place = self._place_before(record)
        if place is None:
            return None
        stage, chunk = place
        return self._senders.get((stage, _message_kind(record.kind), chunk, record.micro_batch))

    def _place_before(self, record: ActionRecord) -> Place | None:
        """Return the place that sent what `record` needed; None if it needed no message."""
        if record.kind == "W":
            return None
        placement = interleaved(self.stages, self.chunks)
        place = (placement.previous_place if record.kind == "F" else placement.next_place)(record.stage, record.chunk)
        return None if place is None or place.stage == record.stage else place

    def _stage_pieces(self, stage: int) -> Iterator[_Piece]:
        now_s = self.start_s
        for record in self._by_stage[stage]:
            needs_message = self._place_before(record) is not None
            # Until its first action a stage waits for it, even if it recorded the start of the wait later.
            wait_start_s = max(record.wait_start_s, now_s) if now_s > self.start_s else now_s
            if wait_start_s > now_s:
                yield _Piece(now_s, wait_start_s, None, True)
                now_s = wait_start_s
            if record.start_s > now_s:
                yield _Piece(now_s, record.start_s, record if needs_message else None, True)
            yield _Piece(max(now_s, record.start_s), record.end_s, None, False)
            now_s = max(now_s, record.end_s)
        if self.end_s > now_s:
            yield _Piece(now_s, self.end_s, None, True)

    def _causes(self, stage: int, piece: _Piece, start_s: float, end_s: float) -> Iterator[tuple[float, float, Cause]]:
        """Yield the causes of `piece` of `stage`, from `start_s` to `end_s`."""
        if not piece.idle:
            yield start_s, end_s, Cause(CauseKind.STAGE, stage)
            return
        record = piece.awaited
        if record is None:
            yield start_s, end_s, Cause(CauseKind.OVERHEAD, stage)
            return
        if (sender := self._sender(record)) is None:
            yield start_s, end_s, Cause(CauseKind.REPLICA, stage)
            return
        key = (_message_kind(record.kind), record.stage, record.chunk, record.micro_batch)
        sent_s = min(max(sender.end_s, start_s), end_s)
        arrived_s = min(max(self._arrived_s.get(key, end_s), sent_s), end_s)
        if sent_s > start_s:
            yield from self._causes_between(sender.stage, start_s, sent_s)
        if arrived_s > sent_s:
            yield sent_s, arrived_s, Cause(CauseKind.LINK, sender.stage, stage)
        if end_s > arrived_s:
            yield arrived_s, end_s, Cause(CauseKind.OVERHEAD, stage)

    def _causes_between(self, stage: int, start_s: float, end_s: float) -> Iterator[tuple[float, float, Cause]]:
        pieces = self._pieces[stage]
        index = max(0, bisect_right(self._starts_s[stage], start_s) - 1)
        while index < len(pieces) and pieces[index].start_s < end_s:
            piece = pieces[index]
            from_s, to_s = max(piece.start_s, start_s), min(piece.end_s, end_s)
            if to_s > from_s:
                yield from self._causes(stage, piece, from_s, to_s)
            index += 1


def _message_kind(kind: str) -> str:
    return "F" if kind == "F" else "B"


def _merged(causes: Iterable[tuple[float, float, Cause]]) -> Iterator[tuple[float, float, Cause]]:
    """Merge neighbours with the same cause."""
    held: tuple[float, float, Cause] | None = None
    for start_s, end_s, cause in causes:
        if held is not None and held[2] == cause:
            held = (held[0], end_s, cause)
            continue
        if held is not None:
            yield held
        held = (start_s, end_s, cause)
    if held is not None:
        yield held
