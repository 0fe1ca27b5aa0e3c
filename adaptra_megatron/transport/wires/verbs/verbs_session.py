# SPDX-License-Identifier: Apache-2.0
"""One session over verbs: several rails, chunks striped over those that work, each arriving once.

Decides and accounts; its owner moves bytes to the peer, rings doorbells and watches the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from adaptra_megatron.transport.wires.verbs.rail import (
    Completion,
    Did,
    QueuePair,
    QueuePairError,
    Rail,
    RailState,
    RailTiming,
)
from adaptra_megatron.transport.wires.verbs.verbs_messages import Grant, Hello, RailMessage, Unable, VerbsMessage

# Which rail carries which chunk, and which chunks have arrived: the bookkeeping that makes each arrive once.
# A rail is a queue pair over one RNIC and its counterpart. Chunks are the frames of a session's ring, numbered from
# 0 in the order of the ring: chunk n leaves from slot n of the sender's ring and belongs into slot n of the
# receiver's.

_HALF = 1 << 31


class VerbsReceived:
    """Chunks of the peer that have arrived, over whichever rail."""

    def __init__(self, slots: int) -> None:
        self.below = 0
        """Every chunk below this one has arrived."""
        self._slots = slots
        self._beyond: set[int] = set()

    @property
    def beyond(self) -> list[int]:
        """Return what has arrived after the first that has not."""
        return sorted(self._beyond)

    def number(self, immediate: int) -> int:
        """The chunk whose number ends in these 32 bits. Raises ValueError for one that has no slot yet."""
        chunk = self.below + _nearest(immediate - self.below)
        if not 0 <= chunk < self.below + self._slots:
            raise ValueError(f"chunk {chunk} came before its slot was granted; all below {self.below} are here")
        return chunk

    def note(self, chunk: int) -> bool:
        """Return whether this chunk is new."""
        if chunk < self.below or chunk in self._beyond:
            return False
        self._beyond.add(chunk)
        while self.below in self._beyond:
            self._beyond.remove(self.below)
            self.below += 1
        return True


class Assignment(NamedTuple):
    """A chunk that is to leave over a rail now."""

    rail: int
    chunk: int
    nbytes: int


@dataclass
class _Lane:
    usable: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)
    """Size of each chunk on its way."""
    nbytes: int = 0

    def remove(self, chunk: int) -> int:
        nbytes = self.in_flight.pop(chunk)
        self.nbytes -= nbytes
        return nbytes


class Stripes:
    """Chunks from the ring until they have arrived, spread over rails by what each has on its way."""

    def __init__(self, rails: int) -> None:
        self._lanes = [_Lane() for _ in range(rails)]
        self._waiting: list[tuple[int, int]] = []
        self._granted = 0

    @property
    def pending(self) -> int:
        """Chunks that have not arrived as far as is known."""
        return len(self._waiting) + sum(len(lane.in_flight) for lane in self._lanes)

    def in_flight(self, rail: int) -> int:
        """Chunks on their way over this rail."""
        return len(self._lanes[rail].in_flight)

    def add(self, chunk: int, nbytes: int) -> None:
        """A chunk is ready to leave."""
        heapq.heappush(self._waiting, (chunk, nbytes))

    def grant(self, chunks: int) -> None:
        """The receiver has slots for all chunks below this number. Never less than before."""
        self._granted = max(self._granted, chunks)

    def granted_number(self, immediate: int) -> int:
        """The grant whose number ends in these 32 bits."""
        return self._granted + _nearest(immediate - self._granted)

    def use(self, rail: int) -> None:
        self._lanes[rail].usable = True

    def avoid(self, rail: int) -> None:
        """Nothing more leaves over this rail. What is on its way stays there until `settle`."""
        self._lanes[rail].usable = False

    def next(self) -> Assignment | None:
        """The oldest chunk, over the rail with the least on its way. None without a rail, a slot or a chunk."""
        usable = [rail for rail, lane in enumerate(self._lanes) if lane.usable]
        if not usable or not self._waiting or self._waiting[0][0] >= self._granted:
            return None
        chunk, nbytes = heapq.heappop(self._waiting)
        rail = min(usable, key=lambda rail: (self._lanes[rail].nbytes, len(self._lanes[rail].in_flight)))
        self._lanes[rail].in_flight[chunk] = nbytes
        self._lanes[rail].nbytes += nbytes
        return Assignment(rail, chunk, nbytes)

    def delivered(self, rail: int, chunk: int) -> int:
        """The receiver's RNIC has acknowledged this chunk. Returns its size."""
        return self._lanes[rail].remove(chunk)

    def settle(self, rail: int, below: int, beyond: Sequence[int]) -> list[tuple[int, int]]:
        """A dead rail can carry nothing any more, and the receiver has these chunks: the others leave again.

        Returns number and size of those that have arrived.
        """
        lane, here = self._lanes[rail], set(beyond)
        arrived = []
        for chunk in sorted(lane.in_flight):
            nbytes = lane.remove(chunk)
            if chunk < below or chunk in here:
                arrived.append((chunk, nbytes))
            else:
                self.add(chunk, nbytes)
        return arrived


def _nearest(difference: int) -> int:
    """The smallest number, positive or negative, with the same 32 bits."""
    return ((difference + _HALF) & 0xFFFFFFFF) - _HALF


class Outside(Protocol):
    """Effects of a session on the outside."""

    def send(self, message: VerbsMessage) -> None:
        """To the peer, in order."""

    def release(self, chunk: int) -> None:
        """The peer has it: its slot of the outbound ring may be used again."""

    def commit(self, chunk: int) -> int:
        """It is in its slot of the inbound ring. Returns its size."""


class VerbsSession:
    """Times are given, in seconds of the monotonic clock. ValueErrors name what the peer cannot have said."""

    def __init__(
        self,
        queue_pairs: Sequence[QueuePair],
        *,
        initiates: bool,
        slots: int,
        outside: Outside,
        now_s: float,
        timing: RailTiming | None = None,
    ) -> None:
        """`initiates`: whether this side raises rails, and the other answers; `slots` of each ring."""
        self.sent_nbytes = self.received_nbytes = 0
        self.rail_chunks = [0] * len(queue_pairs)
        """Chunks that each rail has delivered to the peer, as far as this end saw it."""
        self._outside = outside
        self._stripes = Stripes(len(queue_pairs))
        self._received = VerbsReceived(slots)
        self._slots = slots
        self._claimed = self._granted = 0
        self._grants_void = False
        self._grants_in_flight = [0] * len(queue_pairs)
        self._now_s = self._up_s = now_s
        self._ever_up = False
        timing = timing or RailTiming()
        self._rails = [Rail(index, pair, initiates, self, timing) for index, pair in enumerate(queue_pairs)]

    @property
    def pending(self) -> int:
        """Chunks that the peer does not have yet, as far as is known."""
        return self._stripes.pending

    @property
    def rail_states(self) -> list[RailState]:
        return [rail.state for rail in self._rails]

    @property
    def hopeless(self) -> bool:
        """Return whether no rail has ever been up, though each was tried."""
        return not self._ever_up and all(rail.failures for rail in self._rails)

    @property
    def wants_slots(self) -> bool:
        """Return whether the peer may soon have none left to write into: more are to be claimed as soon as there are
        any."""
        return self._claimed - self._received.below <= self._slots // 2

    @property
    def wants_frames(self) -> bool:
        """Return whether the rails may soon have nothing to do. Otherwise a completion comes first, and frames can
        wait."""
        return self._stripes.pending < self._slots // 2

    @property
    def outage_s(self) -> float:
        """For how many seconds no rail has been up."""
        return self._now_s - self._up_s

    def outage(self) -> tuple[float, str]:
        """For how many seconds no rail has been up, and why."""
        causes = "; ".join(f"{rail.queue_pair.device}: {rail.cause}" for rail in self._rails)
        return self.outage_s, causes

    def taken(self, chunk: int, nbytes: int) -> None:
        """A frame with `nbytes` of payload is to leave."""
        self._stripes.add(chunk, nbytes)

    def claimed(self, chunk: int) -> None:
        """There is a slot for this chunk of the peer, and for all before it."""
        self._claimed = chunk + 1

    def on_message(self, message: VerbsMessage, now_s: float) -> None:
        """A message of the peer."""
        self._now_s = now_s
        if isinstance(message, Grant):
            self._stripes.grant(message.chunks)
        elif isinstance(message, Hello | Unable):
            raise ValueError("the peer began twice")
        elif message.rail < len(self._rails):
            self._rails[message.rail].on_message(message, now_s)
        else:
            raise ValueError(f"there is no rail {message.rail}, only {len(self._rails)}")

    def advance(self, now_s: float) -> None:
        """Do all that can be done now. To be called after anything has happened, and at `next_s`."""
        self._now_s = now_s
        for index, rail in enumerate(self._rails):
            self.collect(index)
            if rail.state in (RailState.RAISING, RailState.UP):
                self._look_for_events(rail)
            rail.tick(self._in_flight(index), now_s)
        self._send()
        self._grant()
        if any(rail.state is RailState.UP for rail in self._rails):
            self._up_s, self._ever_up = now_s, True

    def next_s(self) -> float | None:
        """Return when to `advance` though nothing happens."""
        due = [rail.due_s(self._in_flight(index)) for index, rail in enumerate(self._rails)]
        return min((due_s for due_s in due if due_s is not None), default=None)

    # What rails need, see verbs_rail.Settlement.

    def send(self, message: RailMessage) -> None:
        self._outside.send(message)

    def received(self) -> tuple[int, list[int]]:
        return self._received.below, self._received.beyond

    def collect(self, rail: int) -> None:
        try:
            completions = self._rails[rail].queue_pair.completions()
        except QueuePairError as cause:
            self._rails[rail].give_up(str(cause), self._now_s)
            return
        failed = [completion for completion in completions if completion.failure is not None]
        if failed:
            # The first to fail says why, and the others are flushed, but not always in this order.
            first = min(failed, key=lambda completion: completion.failure == "WR_FLUSH_ERR")
            self._rails[rail].give_up(f"{first.did.name.lower()}: {first.failure}", self._now_s)
        for completion in completions:
            if completion.failure is None:
                self._account(rail, completion)

    def usable(self, rail: int, usable: bool) -> None:
        (self._stripes.use if usable else self._stripes.avoid)(rail)
        self._grants_void |= not usable

    def settle(self, rail: int, below: int, beyond: list[int]) -> None:
        self._grants_in_flight[rail] = 0
        for chunk, nbytes in self._stripes.settle(rail, below, beyond):
            self._delivered(rail, chunk, nbytes)

    def _account(self, index: int, completion: Completion) -> None:
        rail = self._rails[index]
        if completion.did is Did.PROBE:
            rail.probed(self._now_s)
        elif completion.did is Did.GRANT:
            rail.moved(self._now_s)
            self._grants_in_flight[index] -= 1
        elif completion.did is Did.ON_GRANT:
            self._stripes.grant(self._stripes.granted_number(completion.number))
        elif completion.did is Did.WRITE:
            rail.worked()
            rail.moved(self._now_s)
            self._delivered(index, completion.number, self._stripes.delivered(index, completion.number))
        elif completion.did is Did.RECEIVE:
            chunk = self._received.number(completion.number)
            if chunk >= self._claimed:
                raise ValueError(f"chunk {chunk} came, but slots only for {self._claimed} were granted")
            if self._received.note(chunk):
                self.received_nbytes += self._outside.commit(chunk)

    def _in_flight(self, rail: int) -> int:
        """Return what is on its way over this rail, and has to arrive."""
        return self._stripes.in_flight(rail) + self._grants_in_flight[rail]

    def _delivered(self, rail: int, chunk: int, nbytes: int) -> None:
        self.rail_chunks[rail] += 1
        self.sent_nbytes += nbytes
        self._outside.release(chunk)

    def _look_for_events(self, rail: Rail) -> None:
        try:
            event = rail.queue_pair.event()
        except QueuePairError as cause:
            event = str(cause)
        if event is not None:
            rail.give_up(event, self._now_s)

    def _send(self) -> None:
        while (assignment := self._stripes.next()) is not None:
            rail = self._rails[assignment.rail]
            if self._in_flight(assignment.rail) == 1:
                rail.moved(self._now_s)
            try:
                rail.queue_pair.write(assignment.chunk, assignment.nbytes)
            except QueuePairError as cause:
                rail.give_up(str(cause), self._now_s)  # and settled with the peer, as it may be half posted

    def _grant(self) -> None:
        """Tell the peer of new slots: several together while it has enough, at once where it may run out of them."""
        if self._grants_void:
            self._grants_void, self._granted = False, self._claimed
            self._outside.send(Grant(chunks=self._granted))  # any of them may have been on the rail that failed
            return
        fresh, left = self._claimed - self._granted, self._granted - self._received.below
        if not fresh or (fresh < self._slots // 4 and left > self._slots // 2):
            return
        self._granted = self._claimed
        for index, rail in enumerate(self._rails):
            if rail.state is RailState.UP:
                if not self._in_flight(index):
                    rail.moved(self._now_s)
                try:
                    rail.queue_pair.grant(self._granted)
                    self._grants_in_flight[index] += 1
                    return
                except QueuePairError as cause:
                    rail.give_up(str(cause), self._now_s)
        self._grants_void = False
        self._outside.send(Grant(chunks=self._granted))
