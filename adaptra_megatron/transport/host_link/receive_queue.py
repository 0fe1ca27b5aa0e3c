# SPDX-License-Identifier: Apache-2.0
"""Messages from one neighbour, between their arrival or the asking for them and their use; and what to acknowledge."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from adaptra_megatron.transport.gpu.copies import Receipt
from adaptra_megatron.transport.messages import MessageKey


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that is here."""

    sequence: int | None
    """None where it came by another path than the host path."""
    receipt: Receipt
    arrived_s: float


class ReceiveQueue:
    """Not safe for threads: its link's lock guards it."""

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        """Sequence numbers that the sender is still to be told of: arrived and asked for."""
        self.doubles = 0
        """Messages that were here already, by another path, and were dropped."""
        self.stale = 0
        """Messages of attempts that had ended, which were dropped."""
        self._posted: dict[MessageKey, float] = {}
        self._arrived: dict[MessageKey, Arrival] = {}
        self._used: set[MessageKey] = set()
        """Keys of the latest attempt: earlier ones are over, and theirs not listed."""
        self._turn = (0, 0)
        """The latest attempt, of which receives have been posted."""

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: MessageKey) -> bool:
        """Return whether the message has arrived. Any thread may ask."""
        return key in self._arrived

    def post(self, key: MessageKey, now_s: float) -> None:
        """A receive of `key` is posted. Attempts only go up: what is left of earlier ones is dropped."""
        assert key not in self._posted, f"{key} was posted twice"
        assert key.turn >= self._turn, f"{key} is posted in attempt {self._turn}"
        if key.turn > self._turn:
            self._begin(key.turn)
        self._posted[key] = now_s
        if key in self._arrived:
            self._owe(self._arrived[key])
            self._arrived[key].receipt.begin()

    def posted_s(self, key: MessageKey) -> float:
        """When `key` was asked for."""
        return self._posted[key]

    def arrive(self, key: MessageKey, arrival: Arrival) -> bool:
        """Keep a message and return True; one that is or was here already is dropped, and acknowledged all the same."""
        over = key.turn < self._turn
        if over or key in self._used or key in self._arrived:
            stale = over and key.iteration == self._turn[0]  # all of an iteration that is over have been used
            self.stale += stale
            self.doubles += not stale
            self._owe(arrival)
            return False
        self._arrived[key] = arrival
        if key in self._posted:
            self._owe(arrival)
            arrival.receipt.begin()
        return True

    def arrive_again(self, sequence: int) -> None:
        """A retransmission: acknowledge again, unless its receive has not been posted yet."""
        unasked = {arrival.sequence for key, arrival in self._arrived.items() if key not in self._posted}
        if sequence not in unasked:
            self.due.append(sequence)

    def pop(self, key: MessageKey) -> tuple[Arrival, float]:
        """A message that has arrived and was asked for, and when it was asked for."""
        self._used.add(key)
        return self._arrived.pop(key), self._posted.pop(key)

    def _begin(self, turn: tuple[int, int]) -> None:
        """Another attempt begins: the sender need not keep what nothing will ask for."""
        self._turn = turn
        self._used.clear()
        for key in [key for key in self._arrived if key.turn < turn]:
            arrival = self._arrived.pop(key)
            self.stale += 1
            if key not in self._posted:
                self._owe(arrival)
        for key in [key for key in self._posted if key.turn < turn]:
            del self._posted[key]

    def _owe(self, arrival: Arrival) -> None:
        if arrival.sequence is not None:
            self.due.append(arrival.sequence)
