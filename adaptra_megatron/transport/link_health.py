# SPDX-License-Identifier: Apache-2.0
"""What one end knows about a link being up, down or finished, and the errors that say so."""

from __future__ import annotations

import math

from adaptra_megatron.transport.messages import MessageKey, TransportError

_CAUSE_S = 0.2
"""How long a peer's farewell waits for word of what it closed its end for."""


class LinkHealth:
    """Pure bookkeeping; times are given (seconds of the monotonic clock)."""

    def __init__(self, stage: int, peer: int, grace_s: float, now_s: float, *, one_network: bool = True) -> None:
        """`grace_s`: how long the link may be down before waiting for it makes no sense, while the peer runs.
        `one_network`: whether the host path goes where the line goes, and breaks with it.
        """
        self.lost = False
        """Whether a stage of the pipeline is gone for good: no path brings anything any more."""
        self._stage, self._peer, self._grace_s = stage, peer, grace_s
        self._one_network = one_network
        self._down_since_s: float | None = now_s
        self._grace_from_s = now_s
        self._bye_s: float | None = None
        self._stopped_s: float | None = None
        self._unreachable: str | None = None
        self._culprit = peer
        self.cause = "it has not come up yet"
        """Of the present or the last break."""
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
        """The link is of no use any more."""
        self._failure = cause

    def lose(self, stage: int, cause: str) -> None:
        """A stage is gone for good."""
        self.lost, self._failure, self._culprit = True, cause, stage

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
    def said_bye(self) -> bool:
        """Whether the peer has closed its end on purpose."""
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
        self, doing: str, key: MessageKey, since_s: float, now_s: float, *, receiving: bool, also: str = ""
    ) -> TransportError:
        """The error for a message that has been under way since `since_s`. `also`: what is known of another path."""
        link = f"{self._peer}->{self._stage}" if receiving else f"{self._stage}->{self._peer}"
        return TransportError(
            f"stage {self._stage}, link {link}: {doing} the {key} for {now_s - since_s:.3g} s; "
            f"{self._seen(now_s)}{also and '; '}{also}. Look at stage {self._culprit} first: it died, hangs, or cannot "
            "be reached; restart from the last checkpoint once it is back"
        )

    def not_up_error(self, timeout_s: float) -> TransportError:
        """The error for a link that did not come up at the start, within `timeout_s`."""
        return TransportError(
            f"stage {self._stage}, link {self._stage}<->{self._peer}: the host path does not come up "
            f"within {timeout_s:g} s (--adaptra-timeout-s); {self._failure or self.cause}. Look at stage {self._peer} "
            "first: it died, hangs, or cannot be reached; --adaptra-host-transport off runs without the host path"
        )

    def _seen(self, now_s: float) -> str:
        if self._failure is not None:
            return self._failure
        if self.said_bye:
            return f"stage {self._peer} has closed its end"
        if self._unreachable is not None:
            return f"the host of stage {self._peer} does not answer: {self._unreachable}"
        if self._stopped_s is not None:
            return f"the process of stage {self._peer} is there, but has not run for {now_s - self._stopped_s:.0f} s"
        if self._down_since_s is not None:
            return f"the host path has been down for {now_s - self._down_since_s:.1f} s: {self.cause}"
        return "nothing happened until the deadline (--adaptra-timeout-s)"
