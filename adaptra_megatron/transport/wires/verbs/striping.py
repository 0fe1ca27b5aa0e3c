# SPDX-License-Identifier: Apache-2.0
"""Which rail carries which chunk, and which chunks have arrived: the bookkeeping that makes each arrive once.

A rail is a queue pair over one RNIC and its counterpart. Chunks are the frames of a session's ring, numbered from 0 in
the order of the ring: chunk n leaves from slot n of the sender's ring and belongs into slot n of the receiver's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_HALF = 1 << 31


class Received:
    """Chunks of the peer that have arrived, over whichever rail."""

    def __init__(self, slots: int) -> None:
        self.below = 0
        """Every chunk below this one has arrived."""
        self._slots = slots
        self._beyond: set[int] = set()

    @property
    def beyond(self) -> list[int]:
        """What has arrived after the first that has not."""
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
