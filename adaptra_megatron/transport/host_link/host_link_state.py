# SPDX-License-Identifier: Apache-2.0
"""Share the state of one end of a link: its session, its health, and who waits for news."""

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

# What one end knows about a link being up, down or finished, and the errors that say so.

_CAUSE_S = 0.2
"""How long a peer's farewell waits for word of what it closed its end for."""


class LinkHealth:
    """Pure bookkeeping; times are given (seconds of the monotonic clock)."""

    def __init__(
        self, ends: LinkEnds, grace_s: float, now_s: float, *, one_network: bool = True, opens_s: float = 0.0
    ) -> None:
        """`grace_s`: how long the link may be down before waiting for it makes no sense, while the peer runs;
        `opens_s`: how much longer it may take to come up for the first time. `one_network`: whether the host path goes
        where the line goes, and breaks with it.
        """
        self.over = False
        """Set if a rank is gone for good, or the link was ended: no path brings anything any more."""
        self._ends, self._grace_s = ends, grace_s
        self._one_network = one_network
        self._down_since_s: float | None = now_s
        self._grace_from_s = now_s + opens_s
        self._peer_closed_s: float | None = None
        self._stopped_s: float | None = None
        self._unreachable: str | None = None
        self._culprit: int | None = ends.peer
        self.cause = "it has not come up yet"
        """Cause of the present or the last break."""
        self._failure: str | None = None

    def up(self) -> None:
        """A session has begun."""
        self._down_since_s = None
        self.cause = "its connection ended"

    def down(self, cause: str, now_s: float) -> None:
        """The session is over, or an attempt to begin one failed."""
        self.cause = cause
        if self._down_since_s is None:
            self._down_since_s = self._grace_from_s = now_s

    def fail(self, cause: str) -> None:
        """The link is no longer usable."""
        self._failure = cause

    def lose(self, rank: int | None, cause: str) -> None:
        """A rank is gone for good, or (None) the link is ended with what is under way: of several, the first counts."""
        if not self.over:
            self.over, self._failure, self._culprit = True, cause, rank

    def close_peer(self, now_s: float) -> None:
        """The peer has closed its end on purpose."""
        if self._peer_closed_s is None:
            self._peer_closed_s = now_s

    def on_peer_running(self, running: bool, now_s: float) -> None:
        """The peer's process is there, and does not run; or runs again, and may need the grace to connect."""
        self._stopped_s = None if running else now_s
        self._grace_from_s = now_s

    def line_changed(self, unreachable: str | None) -> None:
        """The peer's host does not answer, and why; None: it does."""
        self._unreachable = unreachable

    @property
    def failed(self) -> bool:
        """Return whether the link is no longer usable."""
        return self._failure is not None

    def travels(self, *, one_network: bool) -> None:
        """Say what the host path has come to be: see `__init__`."""
        self._one_network = one_network

    @property
    def peer_closed(self) -> bool:
        """Return whether the peer has closed its end on purpose."""
        return self._peer_closed_s is not None

    def broken_from_s(self) -> float:
        """Return when waiting for the link stops making sense: -inf if it never does, inf while the link is up."""
        if self._failure is not None:
            return -math.inf
        if self._peer_closed_s is not None:
            return self._peer_closed_s + _CAUSE_S
        if self._unreachable is not None and (self._one_network or self._down_since_s is not None):
            return -math.inf
        if self._down_since_s is None or self._stopped_s is not None:
            return math.inf
        return self._grace_from_s + self._grace_s

    @property
    def down_since_s(self) -> float | None:
        """None while a session is up."""
        return self._down_since_s

    def error(
        self, doing: str, key: str, since_s: float, now_s: float, *, receiving: bool, also: str = ""
    ) -> TransportError:
        """The error for a message that has been under way since `since_s`; an AbortedError where the link was ended.

        `key`: in words. `also`: what is known of another path.
        """
        link = f"{self._ends.here}, link {self._ends.direction(receiving=receiving)}"
        what = f"{link}: {doing} the {key} for {now_s - since_s:.3g} s; {self._seen(now_s)}"
        if self._culprit is None:
            return AbortedError(what)
        return TransportError(
            f"{what}{also and '; '}{also}. Look at {self._ends.name(self._culprit)} first: it died, hangs, or cannot "
            "be reached; restart from the last checkpoint once it is back"
        )

    def not_up_error(self, timeout_s: float) -> TransportError:
        """The error for a link that did not come up at the start, within `timeout_s`."""
        return TransportError(
            f"{self._ends.here}, link {self._ends}: the host path does not come up "
            f"within {timeout_s:g} s (--adaptra-timeout-s); {self._failure or self.cause}. Look at {self._ends.there} "
            "first: it died, hangs, or cannot be reached; --adaptra-host-transport off runs without the host path"
        )

    def _seen(self, now_s: float) -> str:
        if self._failure is not None:
            return self._failure
        if self.peer_closed:
            return f"{self._ends.there} has closed its end"
        if self._unreachable is not None:
            return f"the host of {self._ends.there} does not answer: {self._unreachable}"
        if self._stopped_s is not None:
            return f"the process of {self._ends.there} is there, but has not run for {now_s - self._stopped_s:.0f} s"
        if self._down_since_s is not None:
            return f"the host path has been down for {now_s - self._down_since_s:.1f} s: {self.cause}"
        return "nothing happened until the deadline (--adaptra-timeout-s)"


logger = logger_of(__name__)

MAX_CORRUPTED_SESSIONS = 3
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
        self.state_changed = threading.Condition(lock)
        """For the training thread, where it does not wait in a ring."""
        self.session: Session | None = None
        """None while the link is down."""
        self.health = LinkHealth(ends, grace_s, time.monotonic(), one_network=one_network, opens_s=opens_s)
        self.closing = False
        self.fin_received = False
        """Set once the peer has said that it closes its end; what it had sent before may still have to be read."""
        self.read_out = False
        """Set once the reader has come to the end of the latest session that it has begun."""
        self.consecutive_corruptions = 0
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
        return self.fin_received or self.closing or self.health.over

    def on_fin(self) -> None:
        """The peer has closed its end if it has said so and all of the session has been read.

        Over several connections a farewell may overtake what was sent before it; and of two threads that read, one may
        have it in hand while the other finds the end.
        """
        if self.fin_received and self.read_out:
            self.health.close_peer(time.monotonic())
        self.state_changed.notify_all()

    def begin(self, session: Session) -> None:
        """A new session."""
        self.session, self._may_end = session, True
        self.state_changed.notify_all()

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
        self.consecutive_corruptions += 1
        if self.consecutive_corruptions >= MAX_CORRUPTED_SESSIONS:
            self.health.fail(f"{cause} ({self.consecutive_corruptions} times in a row)")
        self.state_changed.notify_all()
        session.give_up(cause)

    def fail(self, cause: str) -> None:
        """The link is no longer usable."""
        self.health.fail(cause)
        self.notify_waiting()

    def notify_waiting(self) -> None:
        """Wake the training thread, wherever it waits, unless it is the caller."""
        if self.waiting == threading.get_ident():
            return
        self.state_changed.notify_all()
        if self.waiting is not None and self.session is not None:
            self.session.inbound.poke()
