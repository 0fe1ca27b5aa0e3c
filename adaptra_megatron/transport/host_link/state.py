# SPDX-License-Identifier: Apache-2.0
"""What the parts of one end of a link share: its session, its health, and who waits for news."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptra_megatron.log import logger_of
from adaptra_megatron.sparing_log import RateLimitedLog
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.host_link.health import LinkHealth
from adaptra_megatron.transport.link_ends import LinkEnds

logger = logger_of(__name__)

MOST_SPOILT = 3
"""Sessions in a row that bad data may end before the link is given up: what is sent again is as bad every time."""

GiveUp = Callable[[str | None], None]
"""Has the supervisor end a session whose rings are unusable, and begin another: at once for a cause, or, where the
rings are closed and this end cannot tell why, once it is late for being told."""


@dataclass(frozen=True)
class Session:
    """The rings between two breaks of the link."""

    outbound: Ring
    inbound: Ring
    give_up: GiveUp


class HostLinkState:
    """Callers hold the link's lock, unless it says otherwise."""

    def __init__(
        self, ends: LinkEnds, lock: threading.Lock, grace_s: float, *, one_network: bool = True, opens_s: float = 0.0
    ) -> None:
        """`grace_s`, `one_network`, `opens_s`: see LinkHealth."""
        self.ends = ends
        self.news = threading.Condition(lock)
        """For the training thread, where it does not wait in a ring."""
        self.session: Session | None = None
        """None while the link is down."""
        self.health = LinkHealth(ends, grace_s, time.monotonic(), one_network=one_network, opens_s=opens_s)
        self.closing = False
        self.heard_bye = False
        """Set once the peer has said that it closes its end; what it had sent before may still have to be read."""
        self.read_out = False
        """Set once the reader has come to the end of the latest session that it has begun."""
        self.spoilt_in_a_row = 0
        """Sessions that bad data ended since the latest message arrived."""
        self._ended_by: str | None = None
        """Why a session ended, until the log says it."""
        self._ends = RateLimitedLog(logger)
        self._may_end = False
        """Set while there is a session whose end has not been reported."""
        self.waiting: int | None = None
        """The thread that waits for messages, or for their being sent."""

    @property
    def finished(self) -> bool:
        """Return whether one of the two ends was closed on purpose, or is gone. Any thread may ask."""
        return self.heard_bye or self.closing or self.health.over

    def fin_received(self) -> None:
        """The peer has closed its end if it has said so and all of the session has been read.

        Over several connections a farewell may overtake what was sent before it; and of two threads that read, one may
        have it in hand while the other finds the end.
        """
        if self.heard_bye and self.read_out:
            self.health.bye(time.monotonic())
        self.news.notify_all()

    def begin(self, session: Session) -> None:
        """A new session."""
        self.session, self._may_end = session, True
        self.news.notify_all()

    def note_end(self, cause: str | None = None) -> None:
        """The supervisor says why the session has ended (the first cause counts), or all of it has been read.

        The log says so after both: what was still to be read may be the farewell of a peer.
        """
        if cause is not None and self._may_end:
            self._ended_by, self._may_end = cause, False
        if self._ended_by is not None and self.read_out:
            if not self.finished:
                self._ends.warning(
                    "link %s, to %s: the host path is down (%s); reconnecting",
                    *(self.ends, self.ends.there, self._ended_by),
                )
            self._ended_by = None

    def corrupted(self, session: Session, cause: str) -> None:
        """Bad data is in the rings of `session`: it ends, and a link to which that happens too often."""
        session.outbound.close()
        session.inbound.close()
        if self.session is not session:
            return
        self.session = None
        self.health.down(cause, time.monotonic())
        self.spoilt_in_a_row += 1
        if self.spoilt_in_a_row >= MOST_SPOILT:
            self.health.fail(f"{cause} ({self.spoilt_in_a_row} times in a row)")
        self.news.notify_all()
        session.give_up(cause)

    def fail(self, cause: str) -> None:
        """The link is no longer usable."""
        self.health.fail(cause)
        self.notify_waiting()

    def notify_waiting(self) -> None:
        """Wake the training thread, wherever it waits, unless it is the caller."""
        if self.waiting == threading.get_ident():
            return
        self.news.notify_all()
        if self.waiting is not None and self.session is not None:
            self.session.inbound.poke()
