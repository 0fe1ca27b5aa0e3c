# SPDX-License-Identifier: Apache-2.0
"""One session over verbs: several rails, with chunks striped over the working ones, each arriving once.

It decides and keeps the accounts; its owner sends messages to the peer, rings doorbells and watches the clock.
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

_HALF = 1 << 31


class VerbsReceived:
    """Chunks received from the peer, over all rails."""

    def __init__(self, slots: int) -> None:
        self.below = 0
        """Number below which all chunks have arrived."""
        self._slots = slots
        self._beyond: set[int] = set()

    @property
    def beyond(self) -> list[int]:
        """Return the arrived chunks beyond the first missing one."""
        return sorted(self._beyond)

    def number(self, immediate: int) -> int:
        """Return the chunk number that ends in these 32 bits. Raises ValueError if it has no slot yet."""
        chunk = self.below + _nearest(immediate - self.below)
        if not 0 <= chunk < self.below + self._slots:
            raise ValueError(f"chunk {chunk} came before its slot was granted; all below {self.below} are here")
        return chunk

    def note(self, chunk: int) -> bool:
        """Record a chunk; return whether it is new."""
        if chunk < self.below or chunk in self._beyond:
            return False
        self._beyond.add(chunk)
        while self.below in self._beyond:
            self._beyond.remove(self.below)
            self.below += 1
        return True


class Assignment(NamedTuple):
    """A chunk to send over a rail now."""

    rail: int
    chunk: int
    nbytes: int


@dataclass
class _Lane:
    usable: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)
    """Bytes of each chunk in flight."""
    nbytes: int = 0

    def remove(self, chunk: int) -> int:
        nbytes = self.in_flight.pop(chunk)
        self.nbytes -= nbytes
        return nbytes


class Stripes:
    """Distributes chunks over rails by the bytes in flight on each, from the ring to their arrival.

    A rail is a queue pair over one RNIC and its counterpart. Chunk n is the n-th frame of a session: it leaves from
    slot n of the sender's ring and arrives in slot n of the receiver's.
    """

    def __init__(self, rails: int) -> None:
        self._lanes = [_Lane() for _ in range(rails)]
        self._waiting: list[tuple[int, int]] = []
        self._granted = 0

    @property
    def pending(self) -> int:
        """Number of chunks not known to have arrived."""
        return len(self._waiting) + sum(len(lane.in_flight) for lane in self._lanes)

    def in_flight(self, rail: int) -> int:
        """Return the chunks in flight over this rail."""
        return len(self._lanes[rail].in_flight)

    def add(self, chunk: int, nbytes: int) -> None:
        """Add a chunk that can be sent."""
        heapq.heappush(self._waiting, (chunk, nbytes))

    def grant(self, chunks: int) -> None:
        """Record that the receiver has slots for all chunks below this number, which never decreases."""
        # Grants come by several rails and by the connection, so an earlier one may come later.
        self._granted = max(self._granted, chunks)

    def granted_number(self, immediate: int) -> int:
        """Return the grant whose number ends in these 32 bits."""
        return self._granted + _nearest(immediate - self._granted)

    def use(self, rail: int) -> None:
        self._lanes[rail].usable = True

    def avoid(self, rail: int) -> None:
        """Stop using this rail. Its chunks in flight stay until `settle`."""
        self._lanes[rail].usable = False

    def next(self) -> Assignment | None:
        """Assign the oldest chunk to the rail with the least in flight; None without a rail, slot or chunk."""
        usable = [rail for rail, lane in enumerate(self._lanes) if lane.usable]
        if not usable or not self._waiting or self._waiting[0][0] >= self._granted:
            return None
        chunk, nbytes = heapq.heappop(self._waiting)
        rail = min(usable, key=lambda rail: (self._lanes[rail].nbytes, len(self._lanes[rail].in_flight)))
        self._lanes[rail].in_flight[chunk] = nbytes
        self._lanes[rail].nbytes += nbytes
        return Assignment(rail, chunk, nbytes)

    def delivered(self, rail: int, chunk: int) -> int:
        """Record that the receiver's RNIC has acknowledged this chunk; return its size."""
        return self._lanes[rail].remove(chunk)

    def settle(self, rail: int, below: int, beyond: Sequence[int]) -> list[tuple[int, int]]:
        """Requeue the chunks of a fenced rail that the receiver does not have.

        Returns number and size of the chunks that it has.
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
    """Return the smallest number, positive or negative, with the same 32 bits."""
    return ((difference + _HALF) & 0xFFFFFFFF) - _HALF


class Outside(Protocol):
    """Callbacks of a session to its wire."""

    def send(self, message: VerbsMessage) -> None:
        """Send to the peer, in order."""

    def release(self, chunk: int) -> None:
        """Release the chunk's slot of the outbound ring: the peer has it."""

    def commit(self, chunk: int) -> int:
        """Publish the chunk's slot of the inbound ring; return its size."""


class VerbsSession:
    """State machine of a verbs session. Times are arguments (monotonic seconds). ValueErrors name an impossible
    message."""

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
        """`initiates`: whether this side raises rails; `slots`: of each ring."""
        self.sent_nbytes = self.received_nbytes = 0
        self.rail_chunks = [0] * len(queue_pairs)
        """Number of chunks that each rail has delivered to the peer, as far as known here."""
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
        """Number of chunks that the peer is not known to have."""
        return self._stripes.pending

    @property
    def rail_states(self) -> list[RailState]:
        return [rail.state for rail in self._rails]

    @property
    def hopeless(self) -> bool:
        """Return whether every rail was tried and none has ever come up."""
        return not self._ever_up and all(rail.failures for rail in self._rails)

    @property
    def wants_slots(self) -> bool:
        """Return whether the peer may soon run out of slots, so that available slots should be claimed soon."""
        return self._claimed - self._received.below <= self._slots // 2

    @property
    def wants_frames(self) -> bool:
        """Return whether rails may soon be idle. Otherwise frames can wait for a completion."""
        return self._stripes.pending < self._slots // 2

    @property
    def outage_s(self) -> float:
        """Seconds for which no rail has been up."""
        return self._now_s - self._up_s

    def outage(self) -> tuple[float, str]:
        """Return for how many seconds no rail has been up, and why."""
        causes = "; ".join(f"{rail.queue_pair.device}: {rail.cause}" for rail in self._rails)
        return self.outage_s, causes

    def taken(self, chunk: int, nbytes: int) -> None:
        """Record a frame with `nbytes` of payload to send."""
        self._stripes.add(chunk, nbytes)

    def claimed(self, chunk: int) -> None:
        """Record that all chunks of the peer up to this one have a slot."""
        self._claimed = chunk + 1

    def on_message(self, message: VerbsMessage, now_s: float) -> None:
        """Handle a message of the peer."""
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
        """Perform all actions that are possible now. Called after every event, and at `next_s`."""
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
        """Return when to call `advance` next without an event."""
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
            # The training process may be reading the slot that this has overwritten: the session ends.
            if chunk >= self._claimed:
                raise ValueError(f"chunk {chunk} came, but slots only for {self._claimed} were granted")
            if self._received.note(chunk):
                self.received_nbytes += self._outside.commit(chunk)

    def _in_flight(self, rail: int) -> int:
        """Return the chunks in flight over this rail."""
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
            # It was idle: its silence counts from now on.
            if self._in_flight(assignment.rail) == 1:
                rail.moved(self._now_s)
            try:
                rail.queue_pair.write(assignment.chunk, assignment.nbytes)
            except QueuePairError as cause:
                rail.give_up(str(cause), self._now_s)  # and settled with the peer, as it may be half posted

    def _grant(self) -> None:
        """Grant new slots: several at once while the peer has enough, otherwise immediately."""
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
