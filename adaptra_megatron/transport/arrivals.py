# SPDX-License-Identifier: Apache-2.0
"""Messages from one neighbour, between their arrival or the asking for them and their use; and what to acknowledge."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from adaptra_megatron.transport.messages import MessageKey


@dataclass(frozen=True)
class Arrival:
    """A message that is here."""

    sequence: int
    tensor: torch.Tensor
    arrived_s: float


class Arrivals:
    """Not safe for threads: its link's lock guards it."""

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        """Sequence numbers that the sender is still to be told of: arrived and asked for."""
        self._posted: dict[MessageKey, float] = {}
        self._arrived: dict[MessageKey, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: MessageKey) -> bool:
        """Whether the message has arrived. Any thread may ask."""
        return key in self._arrived

    def post(self, key: MessageKey, now_s: float) -> None:
        """Somebody asks for `key`."""
        assert key not in self._posted, f"{key} was posted twice"
        self._posted[key] = now_s
        if key in self._arrived:
            self.due.append(self._arrived[key].sequence)

    def posted_s(self, key: MessageKey) -> float:
        """When `key` was asked for."""
        return self._posted[key]

    def arrive(self, key: MessageKey, arrival: Arrival) -> None:
        """Keep a message; one whose key is here already is dropped, and the sender told to do so too."""
        first = self._arrived.setdefault(key, arrival) is arrival
        if key in self._posted or not first:
            self.due.append(arrival.sequence)

    def arrive_again(self, sequence: int) -> None:
        """It was sent again: its acknowledgement was lost, unless there was none because nobody has asked for it."""
        unasked = {arrival.sequence for key, arrival in self._arrived.items() if key not in self._posted}
        if sequence not in unasked:
            self.due.append(sequence)

    def pop(self, key: MessageKey) -> tuple[Arrival, float]:
        """A message that has arrived and was asked for, and when it was asked for."""
        return self._arrived.pop(key), self._posted.pop(key)
