# SPDX-License-Identifier: Apache-2.0
"""What the parts of one end of a link share: its session, its health, the lock, and who waits for news."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.link_health import LinkHealth


@dataclass(frozen=True)
class Session:
    """The rings between two breaks of the link."""

    outbound: Ring
    inbound: Ring


class HostLinkState:
    """`lock` guards all of it, and what its link's parts keep for themselves."""

    def __init__(self, stage: int, peer: int, grace_s: float) -> None:
        """`grace_s`: how long the link may be down before waiting for it makes no sense."""
        self.stage, self.peer = stage, peer
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)
        """For the training thread, where it does not wait in a ring."""
        self.session: Session | None = None
        """None while the link is down."""
        self.health = LinkHealth(stage, peer, grace_s, time.monotonic())
        self.closing = False
        self.heard_bye = False
        """Whether the peer has said that it closes its end; what it had sent before may still have to be read."""
        self.read_out = False
        """Whether the reader has come to the end of the latest session that it has begun."""
        self.waiting: int | None = None
        """The thread that waits for messages, or for their being sent."""

    @property
    def finished(self) -> bool:
        """Whether one of the two ends was closed on purpose. Any thread may ask."""
        return self.heard_bye or self.closing

    def note_farewell(self) -> None:
        """The peer has closed its end if it has said so and all of the session has been read. With the lock held.

        Over several connections a farewell may overtake what was sent before it; and of two threads that read, one may
        have it in hand while the other finds the end.
        """
        if self.heard_bye and self.read_out:
            self.health.said_bye = True
        self.news.notify_all()

    def fail(self, cause: str) -> None:
        """The link is of no use any more. Without the lock."""
        with self.lock:
            self.health.fail(cause)
            self.news.notify_all()

    def tell_waiting(self) -> None:
        """Wake the training thread, wherever it waits, unless it is the caller, who holds the lock."""
        if self.waiting is None or self.waiting == threading.get_ident():
            return
        self.news.notify_all()
        if self.session is not None:
            self.session.inbound.poke()
