# SPDX-License-Identifier: Apache-2.0
"""Life cycle of a rail: both ends raise it, use it, give it up, fence it off, and raise it again.

    connecting side             the other
    raise (endpoint) ->         prepares, connects
    connects, probes  <-        raised (endpoint)
    ready ->                    both use it
    fenced ->     <- fenced     in either order, by which end noticed first; then both wait, and it starts again

A rail is given up after an error completion, an event of its port, or a timeout, since completions may never come. Its
chunks are sent again only when both ends are fenced off. Otherwise a late packet could write into a slot that has been
reused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.wires.verbs.verbs_messages import (
    Fenced,
    RailMessage,
    Raise,
    Raised,
    Ready,
    VerbsEndpoint,
)

logger = logger_of(__name__)
Result = TypeVar("Result")


class QueuePairError(OSError):
    """RNIC, driver or libibverbs refused a request."""


class Did(enum.Enum):
    """Purpose of a completed work request."""

    RECEIVE = enum.auto()
    WRITE = enum.auto()
    PROBE = enum.auto()
    GRANT = enum.auto()
    """This end granted slots."""
    ON_GRANT = enum.auto()
    """The peer granted slots."""


class Completion(NamedTuple):
    did: Did
    number: int
    """WRITE: the chunk. RECEIVE, ON_GRANT: the immediate data."""
    failure: str | None


class QueuePair(Protocol):
    """Interface of one end's queue pair. No method waits. All raise QueuePairError."""

    device: str

    def port_active(self) -> bool:
        """Return whether the port has a link."""

    def prepare(self) -> VerbsEndpoint:
        """Bring the pair, from any state, to one in which the peer can connect, with receives posted."""

    def connect(self, peer: VerbsEndpoint) -> None:
        """Connect to the peer's end: ready to receive and to send."""

    def probe(self) -> None:
        """Post a request that changes nothing at the peer."""

    def write(self, chunk: int, nbytes: int) -> None:
        """Write a chunk with `nbytes` of payload to the peer's slot of the same number."""

    def grant(self, chunks: int) -> None:
        """Grant the peer slots for all chunks below this number. Lost if the rail fails."""

    def completions(self) -> list[Completion]:
        """Return the completions since the last call."""

    def event(self) -> str | None:
        """Return an event after which this rail is unusable; None if there is none."""

    def stop(self) -> None:
        """Move the pair to the error state: requests complete with an error."""

    @property
    def drained(self) -> bool:
        """Return whether every posted receive has completed."""

    def reset(self) -> None:
        """Reset the pair: nothing can arrive any more."""


@dataclass(frozen=True)
class RailTiming:
    """Limits of a rail, in seconds."""

    silence_s: float = 1.0
    """Longest time for chunks in flight on a rail without any arriving."""
    raise_s: float = 2.0
    """Longest time to raise a rail, probe included."""
    fence_s: float = 0.25
    """Longest wait for the requests of a stopped queue pair to complete."""
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    """Longest pause between attempts to raise a rail; it doubles until a chunk gets through."""


class RailState(enum.Enum):
    DOWN = "down"
    RAISING = "raising"
    UP = "up"
    FENCING = "fencing"
    """Given up; completions of posted requests may still come."""
    FENCED = "fenced"
    """This end is fenced; the peer has not confirmed it yet."""


class Settlement(Protocol):
    """Interface of a session for its rails."""

    def send(self, message: RailMessage) -> None: ...

    def received(self) -> tuple[int, list[int]]:
        """Return the number below which all chunks have arrived, and the chunks beyond it."""

    def collect(self, rail: int) -> None:
        """Account for the rail's completions."""

    def usable(self, rail: int, usable: bool) -> None: ...

    def settle(self, rail: int, below: int, beyond: list[int]) -> None:
        """Record that both ends are fenced, and which chunks the peer has."""


class Rail:
    """State machine of one end of a rail. Times are arguments (monotonic seconds)."""

    def __init__(
        self, index: int, queue_pair: QueuePair, initiates: bool, session: Settlement, timing: RailTiming
    ) -> None:
        self.state = RailState.DOWN
        self.cause = "it has not come up yet"
        """Cause of its last failure."""
        self.failures = 0
        """Number of failed attempts to raise it."""
        self.queue_pair = queue_pair
        self._index, self._initiates, self._session, self._timing = index, initiates, session, timing
        self._attempt = 0
        self._due_s = 0.0
        """DOWN: when to raise it. RAISING, FENCING: deadline. UP: when silence becomes a failure."""
        self._backoff = Backoff(timing.first_pause_s, timing.longest_pause_s)
        self._peer_fence: Fenced | None = None

    def due_s(self, in_flight: int) -> float | None:
        """Return the time of the next timed action."""
        if self.state is RailState.FENCED or (self.state is RailState.DOWN and not self._initiates):
            return None
        return self._due_s if self.state is not RailState.UP or in_flight else None

    def moved(self, now_s: float) -> None:
        """Record that something was posted on an idle rail, or has arrived."""
        if self.state is RailState.UP:
            self._due_s = now_s + self._timing.silence_s

    def worked(self) -> None:
        """Record that a chunk has arrived: reset the pause."""
        self._backoff.reset()

    def tick(self, in_flight: int, now_s: float) -> None:
        """Perform timed actions."""
        # At the deadline, too: completions may never come, and after the reset none is needed.
        if self.state is RailState.FENCING and (now_s >= self._due_s or self.queue_pair.drained):
            self._fence(now_s)
            return
        due_s = self.due_s(in_flight)
        if due_s is None or now_s < due_s:
            return
        if self.state is RailState.DOWN:
            self._raise(now_s)
        elif self.state is RailState.RAISING:
            self.give_up(f"it could not be raised within {self._timing.raise_s:g} s", now_s)
        elif self.state is RailState.UP:
            self.give_up(f"nothing arrived for {self._timing.silence_s:g} s", now_s)

    def give_up(self, cause: str, now_s: float) -> None:
        """Fence the rail; chunks in flight are settled with the peer. Does nothing if it is not in use."""
        if self.state not in (RailState.RAISING, RailState.UP):
            return
        log = logger.warning if self.state is RailState.UP else logger.debug
        log("rail %d (%s): %s", self._index, self.queue_pair.device, cause)
        self.failures += self.state is RailState.RAISING
        self.state, self.cause = RailState.FENCING, cause
        self._due_s = now_s + self._timing.fence_s
        self._session.usable(self._index, False)
        self._try(self.queue_pair.stop)

    def probed(self, now_s: float) -> None:
        """Record that the probe got through."""
        if self.state is RailState.RAISING and self._initiates:
            self._session.send(Ready(rail=self._index, attempt=self._attempt))
            self._use(now_s)

    def on_message(self, message: RailMessage, now_s: float) -> None:
        """Handle a message of the peer. Raises ValueError for an impossible one."""
        if isinstance(message, Raise):
            self._on_raise(message, now_s)
            return
        if message.attempt != self._attempt:
            raise ValueError(
                f"rail {self._index}: {type(message).__name__} of attempt {message.attempt} in {self._attempt}"
            )
        if isinstance(message, Fenced):
            self._peer_fence = message
            # If this end is fenced already, both are now.
            self.give_up(f"the peer gave it up: {message.cause}", now_s)
            if self.state is RailState.FENCED:
                self._settle(now_s)
        elif self.state is RailState.RAISING and isinstance(message, Raised) == self._initiates:
            if isinstance(message, Ready):
                self._use(now_s)
                return
            self._attempting(lambda: self._connect(message.endpoint), now_s)

    def _raise(self, now_s: float) -> None:
        """Raise the rail, if its port has a link."""
        # First: it is the next attempt's time if this one fails here.
        self._due_s = now_s + self._backoff.next_s()
        if not self._try(self.queue_pair.port_active):
            self.cause = "its port has no link"
            self.failures += 1
            return
        endpoint = self._try(self.queue_pair.prepare)
        if endpoint is None:
            self.failures += 1
            return
        self._begin(self._attempt + 1, now_s)
        self._session.send(Raise(rail=self._index, attempt=self._attempt, endpoint=endpoint))

    def _on_raise(self, message: Raise, now_s: float) -> None:
        # Only the connecting end raises, and only after both are fenced: anything else is no peer of this release.
        if self._initiates or self.state is not RailState.DOWN or message.attempt != self._attempt + 1:
            raise ValueError(f"rail {self._index}: attempt {message.attempt} after {self._attempt}, {self.state.value}")
        self._begin(message.attempt, now_s)

        def answer() -> None:
            if not self.queue_pair.port_active():
                raise QueuePairError("its port has no link")
            endpoint = self.queue_pair.prepare()
            self.queue_pair.connect(message.endpoint)
            self._session.send(Raised(rail=self._index, attempt=self._attempt, endpoint=endpoint))

        self._attempting(answer, now_s)

    def _connect(self, peer: VerbsEndpoint) -> None:
        self.queue_pair.connect(peer)
        self.queue_pair.probe()

    def _begin(self, attempt: int, now_s: float) -> None:
        self.state, self._attempt, self._peer_fence = RailState.RAISING, attempt, None
        self._due_s = now_s + self._timing.raise_s

    def _use(self, now_s: float) -> None:
        self.state = RailState.UP
        self.moved(now_s)
        self._session.usable(self._index, True)
        logger.info("rail %d (%s) is up, attempt %d", self._index, self.queue_pair.device, self._attempt)

    def _fence(self, now_s: float) -> None:
        self._session.collect(self._index)  # resetting may drop completions
        self._try(self.queue_pair.reset)
        self._session.collect(self._index)  # and chunks may have arrived until then
        self.state = RailState.FENCED
        # Not before: the peer sends again all that is not in this.
        below, beyond = self._session.received()
        fence = Fenced(rail=self._index, attempt=self._attempt, below=below, beyond=beyond, cause=self.cause)
        self._session.send(fence)
        if self._peer_fence is not None:
            self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        assert self._peer_fence is not None
        self.state = RailState.DOWN
        self._due_s = now_s + self._backoff.pause_s
        self._session.settle(self._index, self._peer_fence.below, self._peer_fence.beyond)

    def _attempting(self, act: Callable[[], object], now_s: float) -> None:
        try:
            act()
        except QueuePairError as cause:
            self.give_up(str(cause), now_s)

    def _try(self, act: Callable[[], Result]) -> Result | None:
        """Return the result of `act`; None if it failed. Such a failure is ignored, since the rail is down or about to
        be.
        """
        try:
            return act()
        except QueuePairError as cause:
            self.cause = f"{self.cause}; {cause}" if self.state is RailState.FENCING else str(cause)
            return None
