# SPDX-License-Identifier: Apache-2.0
"""Messages from one neighbour, between their arrival or the asking for them and their use; and what to acknowledge."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from adaptra_megatron.transport.copies import Receipt
from adaptra_megatron.transport.messages import MessageKey


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that is here."""

    sequence: int | None
    """None where it came by another path than the host path."""
    receipt: Receipt
    arrived_s: float


class Arrivals:
    """Not safe for threads: its link's lock guards it."""

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        """Sequence numbers that the sender is still to be told of: arrived and asked for."""
        self.doubles = 0
        """Messages that were here already, by another path, and were dropped."""
        self._posted: dict[MessageKey, float] = {}
        self._arrived: dict[MessageKey, Arrival] = {}
        self._used: set[MessageKey] = set()
        """Of the latest iteration: all of earlier ones have been used, and are not listed."""
        self._iteration = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: MessageKey) -> bool:
        """Whether the message has arrived. Any thread may ask."""
        return key in self._arrived

    def post(self, key: MessageKey, now_s: float) -> None:
        """Somebody asks for `key`. Iterations only go up: whoever asks for one has used all of those before."""
        assert key not in self._posted, f"{key} was posted twice"
        if key.iteration > self._iteration:
            self._iteration = key.iteration
            self._used.clear()
        self._posted[key] = now_s
        if key in self._arrived:
            self._owe(self._arrived[key])
            self._arrived[key].receipt.begin()

    def posted_s(self, key: MessageKey) -> float:
        """When `key` was asked for."""
        return self._posted[key]

    def arrive(self, key: MessageKey, arrival: Arrival) -> bool:
        """Keep a message and return True; one that is or was here already is dropped, and acknowledged all the same."""
        if key in self._used or key.iteration < self._iteration or key in self._arrived:
            self.doubles += 1
            self._owe(arrival)
            return False
        self._arrived[key] = arrival
        if key in self._posted:
            self._owe(arrival)
            arrival.receipt.begin()
        return True

    def arrive_again(self, sequence: int) -> None:
        """It was sent again: its acknowledgement was lost, unless there was none because nobody has asked for it."""
        unasked = {arrival.sequence for key, arrival in self._arrived.items() if key not in self._posted}
        if sequence not in unasked:
            self.due.append(sequence)

    def pop(self, key: MessageKey) -> tuple[Arrival, float]:
        """A message that has arrived and was asked for, and when it was asked for."""
        self._used.add(key)
        return self._arrived.pop(key), self._posted.pop(key)

    def _owe(self, arrival: Arrival) -> None:
        if arrival.sequence is not None:
            self.due.append(arrival.sequence)
