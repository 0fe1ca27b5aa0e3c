# SPDX-License-Identifier: Apache-2.0
"""What one end knows about a link being up, down or finished, and the errors that say so."""

from __future__ import annotations

import math

from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.messages import AbortedError, TransportError

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
        self._bye_s: float | None = None
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

    def bye(self, now_s: float) -> None:
        """The peer has closed its end on purpose."""
        if self._bye_s is None:
            self._bye_s = now_s

    def peer_runs(self, running: bool, now_s: float) -> None:
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
    def said_bye(self) -> bool:
        """Return whether the peer has closed its end on purpose."""
        return self._bye_s is not None

    def broken_from_s(self) -> float:
        """When waiting for the link stops making sense: -inf if it never does, inf while the link is up."""
        if self._failure is not None:
            return -math.inf
        if self._bye_s is not None:
            return self._bye_s + _CAUSE_S
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
        if self.said_bye:
            return f"{self._ends.there} has closed its end"
        if self._unreachable is not None:
            return f"the host of {self._ends.there} does not answer: {self._unreachable}"
        if self._stopped_s is not None:
            return f"the process of {self._ends.there} is there, but has not run for {now_s - self._stopped_s:.0f} s"
        if self._down_since_s is not None:
            return f"the host path has been down for {now_s - self._down_since_s:.1f} s: {self.cause}"
        return "nothing happened until the deadline (--adaptra-timeout-s)"
