# SPDX-License-Identifier: Apache-2.0
"""Brings notes to the peer once and in order: by the host path, and by the link's line while that does not answer."""

from __future__ import annotations

import math
from collections.abc import Callable

OVERDUE_S = 0.2
"""How long the host path has for a note before it goes by the line too."""


class ControlChannel:
    """Numbers and order of both directions of one link. Not safe for threads: the link's lock guards it."""

    def __init__(self, say: Callable[[int, bytes], None]) -> None:
        """`say(number, packet)` puts a note on the line. Returns at once; it may be lost if the line breaks."""
        self._say = say
        self._posted = 0
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._unheard: dict[int, tuple[bytes, float]] = {}
        self._said: set[int] = set()
        """Numbers that have been put on the line since it last came up."""

    def post(self, packet: bytes, now_s: float) -> int:
        """A new note: returns the number under which the host path is to carry it."""
        number = self._posted
        self._posted += 1
        self._unheard[number] = (packet, now_s)
        return number

    def acknowledged(self, number: int) -> None:
        """The peer has it."""
        self._unheard.pop(number, None)

    def noted(self, below: int) -> None:
        """The peer has all below this number."""
        for number in [number for number in self._unheard if number < below]:
            del self._unheard[number]

    def line_renewed(self) -> None:
        """What was put on the line before may be lost."""
        self._said.clear()

    def say_overdue(self, now_s: float) -> None:
        """Put on the line what the host path has not brought in time."""
        for number, (packet, posted_s) in self._unheard.items():
            if number not in self._said and now_s >= posted_s + OVERDUE_S:
                self._said.add(number)
                self._say(number, packet)

    @property
    def overdue_from_s(self) -> float:
        """When the next note is to go by the line."""
        unsaid = (posted_s for number, (_, posted_s) in self._unheard.items() if number not in self._said)
        return min(unsaid, default=math.inf) + OVERDUE_S

    def take(self, number: int, packet: bytes) -> list[bytes]:
        """A note has come: what can be read now, in order. Doubles change nothing."""
        if number >= self._next:
            self._early[number] = packet
        readable = []
        while (due := self._early.pop(self._next, None)) is not None:
            readable.append(due)
            self._next += 1
        return readable

    @property
    def acknowledged_below(self) -> int:
        """All notes below this number have come."""
        return self._next
