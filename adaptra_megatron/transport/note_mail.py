# SPDX-License-Identifier: Apache-2.0
"""Brings notes to the peer once and in order: by the host path, and by the job's store while that does not answer."""

from __future__ import annotations

import logging
import time
from typing import Protocol

logger = logging.getLogger("adaptra_megatron.transport.note_mail")

OVERDUE_S = 0.2
"""How long the host path has for a note before it goes into the store too."""
LONGEST_PAUSE_S = 60.0
"""Between two attempts to ask a store that did not answer."""


class Store(Protocol):
    """What is needed of torch.distributed's stores; every call may raise RuntimeError."""

    def set(self, key: str, value: bytes, /) -> None:
        """Set `key`."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all exist."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that exists."""

    def delete_key(self, key: str, /) -> bool:
        """Forget it."""


class NoteMail:
    """Both directions of one link. Numbers and order; the link's lock guards it, but for the two that ask the store."""

    def __init__(self, store: Store, outbound: str, inbound: str) -> None:
        """`outbound`, `inbound`: prefixes of the store's keys, each the other's at the peer."""
        self._store, self._outbound, self._inbound = store, outbound, inbound
        self._posted = 0
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._unheard: dict[int, tuple[bytes, float]] = {}
        self._failures = 0
        self._ask_again_s = 0.0

    def post(self, packet: bytes, now_s: float) -> int:
        """A new note: returns the number under which the host path is to carry it."""
        number = self._posted
        self._posted += 1
        self._unheard[number] = (packet, now_s)
        return number

    def acknowledged(self, number: int) -> None:
        """The peer has it."""
        self._unheard.pop(number, None)

    def overdue(self, now_s: float) -> list[tuple[int, bytes]]:
        """What is to go into the store now."""
        late = [
            (number, packet) for number, (packet, posted_s) in self._unheard.items() if now_s > posted_s + OVERDUE_S
        ]
        for number, _packet in late:
            del self._unheard[number]
        return late

    @property
    def oldest_unheard_s(self) -> float | None:
        """When the oldest note was posted that neither path is known to have brought."""
        return min((posted_s for _packet, posted_s in self._unheard.values()), default=None)

    def take(self, number: int, packet: bytes) -> list[bytes]:
        """A note has come: what can be read now, in order. Doubles change nothing."""
        if number >= self._next:
            self._early[number] = packet
        readable = []
        while (due := self._early.pop(self._next, None)) is not None:
            readable.append(due)
            self._next += 1
        return readable

    def put(self, notes: list[tuple[int, bytes]]) -> None:
        """Into the store. Without the lock."""
        try:
            for number, packet in notes:
                self._store.set(f"{self._outbound}/{number}", packet)
        except RuntimeError as cause:
            self._failed(cause)

    def fetch(self) -> list[tuple[int, bytes]]:
        """What the peer has put into the store. Without the lock."""
        found: list[tuple[int, bytes]] = []
        number = self._next
        if time.monotonic() < self._ask_again_s:
            return found
        try:
            while self._store.check([f"{self._inbound}/{number}"]):
                found.append((number, self._store.get(f"{self._inbound}/{number}")))
                self._store.delete_key(f"{self._inbound}/{number}")
                number += 1
        except RuntimeError as cause:
            self._failed(cause)
        return found

    def _failed(self, cause: Exception) -> None:
        """Such a store rarely comes back, and every attempt to ask it fills the log with torch's complaints."""
        if not self._failures:
            logger.warning("the job's store does not answer (%s): a link whose host path is down cannot change", cause)
        self._ask_again_s = time.monotonic() + min(LONGEST_PAUSE_S, 2.0**self._failures)
        self._failures += 1
