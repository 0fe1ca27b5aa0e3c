# SPDX-License-Identifier: Apache-2.0
"""State of one end of a link, shared by its parts: session, health, and the waiting thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.message_keys import AbortedError, TransportError

_CAUSE_S = 0.2
"""Time between a peer's FIN and the failure of waits: the cause of its end may still arrive."""


class LinkHealth:
    """Health of one link: up, down, closed or failed, and the errors for each. Times are arguments (monotonic
    seconds).
    """

    def __init__(
        self, ends: LinkEnds, grace_s: float, now_s: float, *, one_network: bool = True, opens_s: float = 0.0
    ) -> None:
        """`grace_s`: how long the link may be down, while the peer runs, before waits fail; `opens_s`: additional time
        for its first session. `one_network`: whether host path and control connection use the same network, so that
        they fail together.
        """
        self.over = False
        """True once a rank has failed or the link was aborted: no path delivers anything any more."""
        self.ends, self._grace_s = ends, grace_s
        self._one_network = one_network
        self._down_since_s: float | None = now_s
        self._grace_from_s = now_s + opens_s
        self._peer_closed_s: float | None = None
        self._stopped_s: float | None = None
        self._unreachable: str | None = None
        self._culprit: int | None = ends.peer
        self.cause = "it has not come up yet"
        """Cause of the present or the last interruption."""
        self._failure: str | None = None

    def up(self) -> None:
        """Record that a session has begun."""
        self._down_since_s = None
        self.cause = "its connection ended"

    def down(self, cause: str, now_s: float) -> None:
        """Record that the session has ended, or that one did not begin."""
        self.cause = cause
        if self._down_since_s is None:
            self._down_since_s = self._grace_from_s = now_s

    def fail(self, cause: str) -> None:
        """Mark the link as failed."""
        self._failure = cause

    def lose(self, rank: int | None, cause: str) -> None:
        """Record that a rank has failed, or (None) that the link was aborted. The first cause counts."""
        if not self.over:
            self.over, self._failure, self._culprit = True, cause, rank

    def close_peer(self, now_s: float) -> None:
        """Record that the peer has closed its end on purpose."""
        if self._peer_closed_s is None:
            self._peer_closed_s = now_s

    def on_peer_running(self, running: bool, now_s: float) -> None:
        """Record that the peer's process is stopped, or runs again; it then has the grace period to reconnect."""
        self._stopped_s = None if running else now_s
        self._grace_from_s = now_s

    def line_changed(self, unreachable: str | None) -> None:
        """Record why the peer's host does not answer; None: it answers."""
        self._unreachable = unreachable

    @property
    def failed(self) -> bool:
        """Return whether the link has failed."""
        return self._failure is not None

    def travels(self, *, one_network: bool) -> None:
        """Set `one_network` once the wire is known: see `__init__`."""
        self._one_network = one_network

    @property
    def peer_closed(self) -> bool:
        """Return whether the peer has closed its end on purpose."""
        return self._peer_closed_s is not None

    def broken_from_s(self) -> float:
        """Return the time at which waits fail: -inf if they fail now; inf while the link is up or the peer is only
        stopped.
        """
        if self._failure is not None:
            return -math.inf
        if self._peer_closed_s is not None:
            return self._peer_closed_s + _CAUSE_S
        # Over one network the host path fails with the control connection, though TCP may take minutes to report it. A
        # wire with a network of its own may still work.
        if self._unreachable is not None and (self._one_network or self._down_since_s is not None):
            return -math.inf
        # A stopped process is waited for: SIGCONT continues it, and with it all messages.
        if self._down_since_s is None or self._stopped_s is not None:
            return math.inf
        return self._grace_from_s + self._grace_s

    @property
    def down_since_s(self) -> float | None:
        """Time since which no session is up; None while one is."""
        return self._down_since_s

    def error(
        self, doing: str, key: str, since_s: float, now_s: float, *, receiving: bool, also: str = ""
    ) -> TransportError:
        """Return the error for a message in flight since `since_s`; an AbortedError if the link was aborted.

        `key`: in words. `also`: state of the other path.
        """
        link = f"{self.ends.here}, link {self.ends.direction(receiving=receiving)}"
        what = f"{link}: {doing} the {key} for {now_s - since_s:.3g} s; {self._seen(now_s)}"
        if self._culprit is None:
            return AbortedError(what)
        return TransportError(
            f"{what}{also and '; '}{also}. Look at {self.ends.name(self._culprit)} first: it died, hangs, or cannot "
            "be reached; restart from the last checkpoint once it is back"
        )

    def not_up_error(self, timeout_s: float) -> TransportError:
        """Return the error for a link that did not come up within `timeout_s`."""
        return TransportError(
            f"{self.ends.here}, link {self.ends}: the host path does not come up "
            f"within {timeout_s:g} s (--adaptra-timeout-s); {self._failure or self.cause}. Look at {self.ends.there} "
            "first: it died, hangs, or cannot be reached; --adaptra-host-transport off runs without the host path"
        )

    def _seen(self, now_s: float) -> str:
        if self._failure is not None:
            return self._failure
        if self.peer_closed:
            return f"{self.ends.there} has closed its end"
        if self._unreachable is not None:
            return f"the host of {self.ends.there} does not answer: {self._unreachable}"
        if self._stopped_s is not None:
            return f"the process of {self.ends.there} is there, but has not run for {now_s - self._stopped_s:.0f} s"
        if self._down_since_s is not None:
            return f"the host path has been down for {now_s - self._down_since_s:.1f} s: {self.cause}"
        return "nothing happened until the deadline (--adaptra-timeout-s)"


logger = logger_of(__name__)

MAX_CORRUPTED_SESSIONS = 3
"""Corrupted sessions in a row after which the link fails: resent data would be corrupted again."""

GiveUp = Callable[[str | None], None]
"""Ends a session whose rings are unusable, and begins another.

At once if a cause is given; without one (the rings were closed) after the delegate had time to report its cause."""


@dataclass(frozen=True)
class Session:
    """Rings of one session of the host path."""

    outbound: Ring
    inbound: Ring
    give_up: GiveUp


class HostLinkState(LinkHealth):
    """Health and session of one end of a link, shared by its parts. Callers hold the lock, unless a method says
    otherwise."""

    def __init__(
        self, ends: LinkEnds, lock: threading.Lock, grace_s: float, *, one_network: bool = True, opens_s: float = 0.0
    ) -> None:
        """`grace_s`, `one_network`, `opens_s`: see LinkHealth."""
        super().__init__(ends, grace_s, time.monotonic(), one_network=one_network, opens_s=opens_s)
        self.state_changed = threading.Condition(lock)
        """Notified on every state change; the training thread waits on it when it is not blocked in the ring."""
        self.session: Session | None = None
        """None while the link is down."""
        self.closing = False
        self.fin_received = False
        """True once FIN has arrived; messages sent before it may still have to be read."""
        self.read_out = False
        """True once the reader has reached the end of its latest session."""
        self.consecutive_corruptions = 0
        """Corrupted sessions since the latest message arrived."""
        self._ended_by: str | None = None
        """Cause of the end of a session, until it is logged."""
        self._end_log = RateLimitedLog(logger)
        self._may_end = False
        """True while a session's end has not been reported."""
        self.waiting: int | None = None
        """Id of the thread that waits for messages or sends; None: no thread does."""

    @property
    def finished(self) -> bool:
        """Return whether either end was closed on purpose, or has failed. For any thread."""
        return self.fin_received or self.closing or self.over

    def on_fin(self) -> None:
        """Mark the peer as closed once its FIN has arrived and the session is drained.

        A FIN can overtake data when a session uses several connections. With two reading threads, one may hold the FIN
        while the other sees the end of the session.
        """
        if self.fin_received and self.read_out:
            self.close_peer(time.monotonic())
        self.state_changed.notify_all()

    def begin(self, session: Session) -> None:
        """Begin a session."""
        self.session, self._may_end = session, True
        self.state_changed.notify_all()

    def note_end(self, cause: str | None = None) -> None:
        """Record the cause of a session's end (the first one counts), or that all of the session has been read.

        The end is logged once both are known: a FIN that is still unread would mean that the end is no failure.
        """
        if cause is not None and self._may_end:
            self._ended_by, self._may_end = cause, False
        if self._ended_by is not None and self.read_out:
            if not self.finished:
                self._end_log.warning(
                    "link %s, to %s: the host path is down (%s); reconnecting",
                    *(self.ends, self.ends.there, self._ended_by),
                )
            self._ended_by = None

    def corrupted(self, session: Session, cause: str) -> None:
        """End a session whose ring held invalid data; fail the link after MAX_CORRUPTED_SESSIONS in a row."""
        # No other thread is to use them any more; over shm, none of the peer's either.
        session.outbound.close()
        session.inbound.close()
        # Both threads may find the corruption, and a new session may have begun meanwhile.
        if self.session is not session:
            return
        self.session = None
        self.down(cause, time.monotonic())
        self.consecutive_corruptions += 1
        if self.consecutive_corruptions >= MAX_CORRUPTED_SESSIONS:
            super().fail(f"{cause} ({self.consecutive_corruptions} times in a row)")
        self.state_changed.notify_all()
        session.give_up(cause)

    def fail(self, cause: str) -> None:
        """Mark the link as failed and wake waiting threads."""
        super().fail(cause)
        self.notify_waiting()

    def notify_waiting(self) -> None:
        """Wake the training thread wherever it waits, unless it is the caller."""
        if self.waiting == threading.get_ident():
            return
        self.state_changed.notify_all()
        # A thread that waits in native code, for the ring, does not see the condition.
        if self.waiting is not None and self.session is not None:
            self.session.inbound.poke()
