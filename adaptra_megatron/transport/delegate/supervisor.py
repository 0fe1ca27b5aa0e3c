# SPDX-License-Identifier: Apache-2.0
"""Keep a delegate of this training process running, and its links up: start, restart, reconnect.

The listening sockets belong to the training process and are lent to each delegate. So addresses are kept when delegates
end, and a refused connection means that the training process itself has ended. (Its forked children, such as
data-loader workers, close their copies.) A delegate that is stopped or hangs would block its links silently. So it is
pinged a few times per second, and replaced if it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import structs

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.child_process import ChildProcess
from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.delegate import delegate_control as control
from adaptra_megatron.transport.delegate.delegate_control import (
    CloseLink,
    ControlEndedError,
    DelegateCounters,
    Down,
    Listen,
    Message,
    OpenLink,
    Ping,
    Pong,
    Report,
    StartDelegate,
    Stop,
    Up,
)
from adaptra_megatron.transport.host_link.host_link_state import GiveUp
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop, in_thread
from adaptra_megatron.transport.wires.wire_registry import WIRES

INTERVAL_S = 0.25
PATIENCE_S = 0.75
"""Longest silence of a delegate before it is replaced."""
STARTING_S = 60.0
"""Longest time until the first answer: a new process imports modules, perhaps over a slow network file system."""
LATE_S = 0.1
"""A tick later than this means that this process did not run: silence before it does not count."""


class Heartbeat:
    """Heartbeat of one delegate: decides when to ping and when it has been silent for too long. No clock, thread or
    I/O.

    Silence counts only while this process itself ran. A process that was stopped, or delayed by a busy machine or a
    garbage collection, is late for its own tick; its wait then proves nothing about the delegate. Nor does silence
    count while the delegate waits for a core.

    Times are arguments (seconds of the monotonic clock). Call `tick` at `next_s` or later, and `answered` for each pong
    before a tick that is due.
    """

    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        """Seconds since the unanswered ping, counting only time in which this process ran, and that one could."""
        self.unanswered_s = 0.0
        self.next_s = self._last_s = now_s
        self._asked = self._answered = 0

    def exhausts(self, patience_s: float) -> bool:
        """Return whether the delegate has been silent for longer than `patience_s`; while it starts, or waits for a
        core, STARTING_S.
        """
        longest_s = max(STARTING_S, patience_s)
        return self.unanswered_s >= longest_s or self.silent_s >= (patience_s if self._answered else longest_s)

    def tick(self, now_s: float, waits_for_a_core: Callable[[float], bool] = lambda _: False) -> int | None:
        """Return the number of the ping to send now; None if none is due. `waits_for_a_core`: see `DelegateProcess`."""
        if now_s < self.next_s:
            return None
        on_time, elapsed_s = now_s - self.next_s <= LATE_S, now_s - self._last_s
        self._last_s, self.next_s = now_s, now_s + INTERVAL_S
        waits = waits_for_a_core(elapsed_s)
        if self._asked > self._answered:
            self.unanswered_s += elapsed_s if on_time else 0.0
            self.silent_s += elapsed_s if on_time and not waits else 0.0
            return None
        self._asked += 1
        return self._asked

    def answered(self, number: int) -> None:
        """Record the pong of ping `number`."""
        self._answered = max(self._answered, number)
        if self._answered == self._asked:
            self.silent_s = self.unanswered_s = 0.0


class DelegateProcess(ChildProcess):
    """One running delegate process."""

    def __init__(self, start: StartDelegate, listeners: Sequence[socket.socket]) -> None:
        """Start the process, as ChildProcess does."""
        self.heartbeat, self._ran_s = Heartbeat(time.monotonic()), 0.0
        super().__init__("adaptra_megatron.transport.delegate.delegate", socket.SOCK_SEQPACKET)
        self.channel.settimeout(5.0)
        with contextlib.suppress(ControlEndedError):  # seen where the channel is read
            control.send(self.channel, start, [listener.fileno() for listener in listeners])

    def waits_for_a_core(self, elapsed_s: float) -> bool:
        """Return whether the process is to run and has hardly done so: for less than half of `elapsed_s` since the last
        call."""
        place, before_s = Path(f"/proc/{self.process.pid}"), self._ran_s
        with contextlib.suppress(OSError):  # it has ended, or this kernel does not say
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            self._ran_s = 1e-9 * int((place / "schedstat").read_text().split()[0])
            return state == "R" and 0.0 < self._ran_s < before_s + elapsed_s / 2
        return False


logger = logger_of(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
STEADY_S = 60.0
"""Lifetime after which a failed delegate is replaced at once; after shorter ones the pause doubles."""
DRAIN_S = 2.0
DELEGATE_REPLY_TIMEOUT_S = 1.0
"""Longest time for which a delegate that closed a session's rings may take to report why."""


class LinkEnd(Protocol):
    """Interface of one end of a link for the supervisor. The supervisor calls its methods in its loop, `connected`
    in a thread."""

    @property
    def finished(self) -> bool:
        """Return whether the link has been closed on purpose and must not be brought up again."""

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        """Take over the rings of a new session. `give_up` ends it: for any thread, also after it has ended."""

    def disconnected(self, cause: str) -> None:
        """Record that the session, or an attempt to begin one, has ended. Called once for each failed attempt."""


@dataclass
class SupervisedLink:
    """State of one link in the supervisor."""

    end: LinkEnd
    request: OpenLink
    """The latest request; its `session` counts the attempts."""
    slots: int
    slot_nbytes: int
    outbound: Ring | None = None
    inbound: Ring | None = None
    retry_s: float | None = None
    """Time of the next attempt; None while a session is up or coming up."""
    end_at: tuple[float, str] | None = None
    """Time at which to end the session that is up, and the cause."""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    transport: str | None = None
    """Wire of its last session; None before the first."""


@dataclass
class _Question:
    number: int
    sent: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    answer: DelegateCounters | None = None


class Supervisor:
    """Owner of the delegate: starts and replaces it, and brings links up again with back-off."""

    def __init__(
        self,
        start: StartDelegate,
        listeners: Sequence[socket.socket],
        links: Sequence[SupervisedLink],
        *,
        patience_s: float = PATIENCE_S,
        loop: ConnectionLoop | None = None,
    ) -> None:
        """Start the delegate and begin to bring up all links.

        `listeners`: owned by the supervisor from now on, like those passed to `listen`. `patience_s`: silence after
        which a delegate is killed and replaced, counted only while this process itself was running. For slow machines,
        it doubles each time until a link comes up. `loop`: of all connections of the rank; None: a new one.
        """
        self.starts = 0
        """Number of delegates started so far."""
        self._start, self._listeners = start, list(listeners)
        self._links = {link.request.peer: link for link in links}
        self._calls: deque[Callable[[], None]] = deque()
        """Calls to make in the loop."""
        self._sessions = itertools.count(1)
        """Session numbers, unique over all links: a message about a closed link is never taken for one of the next."""
        self._delegate: DelegateProcess | None = None
        self._began_s = self._restart_s = 0.0
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._first_patience_s = self._patience_s = patience_s
        self._lock = threading.Lock()
        self._questions: list[_Question] = []
        self._asked = 0
        self._given_up: deque[tuple[SupervisedLink, int, float, str | None]] = deque()
        """(link, session, time, cause) of sessions whose rings an end found unusable."""
        self._closing = False
        self._replaced = RateLimitedLog(logger)
        self._stirred = asyncio.Event()
        """Set by messages of the delegate and by `_wake_up`."""
        self._readable = False
        leave = weakref.WeakMethod(self._leave_to_the_parent)
        os.register_at_fork(after_in_child=lambda: _call_if_there(leave))
        self._loop = ConnectionLoop() if loop is None else loop
        self._served = self._loop.begin(self._run())

    @property
    def process_id(self) -> int | None:
        """Process id of the running delegate; None while none runs."""
        delegate = self._delegate
        return None if delegate is None else delegate.process.pid

    def transport(self, peer: int) -> str | None:
        """Return the wire of the link to `peer`, or of its last session; None before the link first came up."""
        link = self._links.get(peer)
        return None if link is None else link.transport

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on this listener too. Returns at once, like `add` and `remove`; for any thread."""
        self._calls.append(functools.partial(self._listen_too, listener))
        self._wake_up()

    def add(self, link: SupervisedLink) -> None:
        """Begin to bring up a link. The link of an earlier opening must have been removed."""
        self._calls.append(functools.partial(self._add, link))
        self._wake_up()

    def remove(self, end: LinkEnd, drain_s: float = 0.0) -> None:
        """Close a link once its outbound ring is empty, or after `drain_s`."""
        self._calls.append(functools.partial(self._remove, end, drain_s))
        self._wake_up()

    def counters(self, timeout_s: float) -> DelegateCounters | None:
        """Return the running delegate's counters; None if it does not answer within `timeout_s`."""
        with self._lock:
            self._asked += 1
            question = _Question(self._asked)
            self._questions.append(question)
        self._wake_up()
        question.answered.wait(timeout_s)
        return question.answer

    def close(self) -> None:
        """End the delegate, which has DRAIN_S to empty the rings. May be called twice."""
        self._closing = True
        self._wake_up()
        self._loop.end(self._served, 2 * DRAIN_S + 5.0)
        for listener in self._listeners:
            listener.close()

    def _leave_to_the_parent(self) -> None:
        """In a forked child: close listeners and rings without taking a lock, as no other thread runs there.

        A child that kept listeners open would accept connections that nobody answers once the parent has failed.
        """
        delegate = self._delegate
        channels = [delegate.channel] if delegate is not None else []
        for each in (*self._listeners, *channels):
            each.close()
        for link in self._links.values():
            for ring in (link.outbound, link.inbound):
                if ring is not None:
                    ring.disown()

    def _wake_up(self) -> None:
        self._loop.call(self._stirred.set)

    async def _run(self) -> None:
        try:
            while not self._closing:
                await self._step()
        except Exception:
            logger.exception("internal error in the supervisor of the delegate; the host path is down from now on")
        finally:
            await self._end()

    async def _step(self) -> None:
        self._stirred.clear()
        # Links belong to the loop: other threads only append calls.
        while self._calls:
            self._calls.popleft()()
        now_s = time.monotonic()
        self._end_unusable_sessions(now_s)
        if self._delegate is None and now_s >= self._restart_s:
            self._begin()
        if self._delegate is not None:
            for link in self._links.values():
                if link.retry_s is not None and now_s >= link.retry_s:
                    link.retry_s = None
                    if not link.end.finished:
                        self._open(link)
            self._ask()
            await self._feel_the_pulse(now_s)
        await self._listen(self._next_s())

    def _listen_too(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._send(Listen(), [listener.fileno()])

    def _add(self, link: SupervisedLink) -> None:
        assert link.request.peer not in self._links, f"there is a link to rank {link.request.peer} already"
        link.retry_s = 0.0
        self._links[link.request.peer] = link

    def _remove(self, end: LinkEnd, drain_s: float) -> None:
        link = next((link for link in self._links.values() if link.end is end), None)
        if link is None:  # it has not been added
            return
        del self._links[link.request.peer]
        if link.outbound is not None:
            link.outbound.close()
        self._send(CloseLink(peer=link.request.peer, opening=link.request.opening, drain_s=drain_s))
        if link.inbound is not None:
            link.inbound.close()

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to the delegate, if one is running."""
        if self._delegate is not None:
            with contextlib.suppress(ControlEndedError):  # seen where the channel is read
                control.send(self._delegate.channel, message, descriptors)

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        # First: it is the time of the next attempt, should this one fail.
        self._restart_s = self._began_s + self._backoff.next_s()
        try:
            self._delegate = DelegateProcess(self._start, self._listeners)
        except OSError as cause:  # no process, no memory, no descriptor: there may be one in a moment
            self._replace(f"cannot be started: {cause}")
            return
        self.starts += 1
        for link in self._links.values():
            link.retry_s = 0.0

    def _end_unusable_sessions(self, now_s: float) -> None:
        while self._given_up:
            link, session, at_s, cause = self._given_up.popleft()
            if session == link.request.session and link.retry_s is None:
                # Closed rings are a symptom. The delegate's Down, with the cause, may still be on its way.
                late_s = at_s + DELEGATE_REPLY_TIMEOUT_S
                ends = (at_s, cause) if cause else (late_s, "its rings were closed, and no delegate said why")
                link.end_at = min(ends, link.end_at or ends)
        for link in self._links.values():
            if link.end_at is not None and now_s >= link.end_at[0]:
                self._went_down(link, link.end_at[1])

    def _next_s(self) -> float:
        """Return the time of the next timed action."""
        if self._delegate is None:
            return self._restart_s
        retries = (link.retry_s for link in self._links.values() if link.retry_s is not None)
        ends = (link.end_at[0] for link in self._links.values() if link.end_at is not None)
        return min([self._delegate.heartbeat.next_s, *retries, *ends])

    async def _listen(self, until_s: float) -> None:
        """Wait for a message of the delegate or a wake-up, until `until_s`, and handle it."""
        channel = None if self._delegate is None else self._delegate.channel
        # Only while this waits: the loop would call it over and over for a message that is not read yet.
        if channel is not None:
            self._loop.loop.add_reader(channel, self._note_readable)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stirred.wait(), max(0.0, until_s - time.monotonic()))
        if channel is None:
            return
        self._loop.loop.remove_reader(channel)
        if self._readable:
            self._readable = False
            try:
                received = control.receive(channel)
            except ControlEndedError:
                await self._lose(1.0, "ended by {}")
            else:
                await self._handle(*received)

    def _note_readable(self) -> None:
        self._readable = True
        self._stirred.set()

    async def _lose(self, patience_s: float, what: str) -> None:
        """Wait for the end of the delegate, or kill it after `patience_s`, and start another. `what`: with a place for
        how it ended.
        """
        delegate = self._delegate
        assert delegate is not None
        how = await in_thread(functools.partial(delegate.end, patience_s))
        self._replace(what.format(how))

    async def _handle(self, message: Message, descriptors: list[int]) -> None:
        try:
            if isinstance(message, Pong):
                assert self._delegate is not None
                self._delegate.heartbeat.answered(message.number)
                return
            if isinstance(message, DelegateCounters):
                self._answer(message)
                return
            assert isinstance(message, Up | Down), f"a delegate does not say {message}"
            link = self._links.get(message.peer)
            if link is None or message.session != link.request.session or link.retry_s is not None:
                return  # it is over already, and the first cause counts
            if isinstance(message, Down):
                self._went_down(link, message.cause)
                return
            try:
                if descriptors:
                    link.inbound = Ring.attach(descriptors[0])
            except RuntimeError as cause:
                self._went_down(link, str(cause))
                return
            link.backoff.reset()
            link.transport = message.transport
            if link.request.connects:  # who connects proposes: what it fell to stays when the delegate ends
                link.request = structs.replace(link.request, transport=message.transport)
            self._patience_s = self._first_patience_s
            assert link.outbound is not None
            assert link.inbound is not None
            rings = link.outbound, link.inbound
            # On a GPU it page-locks the rings, which would hold up all connections of the loop.
            await in_thread(functools.partial(link.end.connected, *rings, self._give_up_for(link)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _give_up_for(self, link: SupervisedLink) -> GiveUp:
        session = link.request.session

        def give_up(cause: str | None) -> None:
            self._given_up.append((link, session, time.monotonic(), cause))
            self._wake_up()

        return give_up

    def _open(self, link: SupervisedLink) -> None:
        link.request = structs.replace(link.request, session=next(self._sessions))
        shared = WIRES[link.request.transport].shares_rings
        try:
            link.outbound = Ring.create(link.slots, link.slot_nbytes)
            link.inbound = None if shared else Ring.create(link.slots, link.slot_nbytes)
        except RuntimeError as cause:  # no memory, no descriptor: there may be one in a moment
            self._went_down(link, str(cause))
            return
        self._send(link.request, [ring.fd for ring in (link.outbound, link.inbound) if ring is not None])

    def _went_down(self, link: SupervisedLink, cause: str) -> None:
        for ring in (link.outbound, link.inbound):
            if ring is not None:
                ring.close()
        link.outbound = link.inbound = link.end_at = None
        link.end.disconnected(cause)
        link.retry_s = time.monotonic() + link.backoff.next_s()

    async def _feel_the_pulse(self, now_s: float) -> None:
        """Send a ping if one is due, or kill a delegate that has been silent for too long."""
        assert self._delegate is not None
        heartbeat = self._delegate.heartbeat
        number = heartbeat.tick(now_s, self._delegate.waits_for_a_core)
        if number is not None:
            self._send(Ping(number=number))
        elif heartbeat.exhausts(self._patience_s):
            # A slow machine, perhaps: otherwise each new delegate would be killed as well.
            self._patience_s *= 2
            process = self._delegate.process.pid
            await self._lose(
                0.0, f"(process {process}) did not answer for {heartbeat.unanswered_s:.1f} s and was killed"
            )

    def _replace(self, what: str) -> None:
        """Start another delegate after a failure (`what`), with back-off."""
        self._delegate = None
        if self._closing:
            return
        self._replaced.warning("rank %d: the delegate %s; starting another", self._start.rank, what)
        if time.monotonic() - self._began_s > STEADY_S:
            self._backoff.reset()
        for link in self._links.values():
            self._went_down(link, f"this rank's delegate {what}")
        with self._lock:
            for question in self._questions:
                # The next delegate answers them.
                question.sent = False

    def _ask(self) -> None:
        with self._lock:
            questions = [question for question in self._questions if not question.sent]
        for question in questions:
            question.sent = True
            self._send(Report(number=question.number))

    def _answer(self, counters: DelegateCounters) -> None:
        with self._lock:
            answered = [question for question in self._questions if question.number <= counters.number]
            self._questions = [question for question in self._questions if question.number > counters.number]
        for question in answered:
            question.answer = counters
            question.answered.set()

    async def _end(self) -> None:
        for link in self._links.values():
            if link.outbound is not None:
                # Closed to new messages; the delegate still empties it.
                link.outbound.close()
        if self._delegate is not None:
            self._send(Stop(drain_s=DRAIN_S))
            await in_thread(functools.partial(self._delegate.end, DRAIN_S + 1.0))
            self._delegate = None
        # Only now: until it has ended, the delegate writes into these.
        for link in self._links.values():
            if link.inbound is not None:
                link.inbound.close()


def _call_if_there(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
