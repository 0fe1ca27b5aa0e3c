# SPDX-License-Identifier: Apache-2.0
"""Receiving half of one end of a link: reads events out of the inbound ring.

One thread reads the rings of all links. A thread that waits for a message reads the ring of its link, too. So the
message wakes it directly, and not by way of the reading thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from adaptra_megatron.transport._ring import Delivery, Event, FrameError, Inbox, Ring, RingClosedError, RingError
from adaptra_megatron.transport.gpu.copies import Copies, Receipt
from adaptra_megatron.transport.host_link.frames import ask, is_tensor, tensor_of, type_of
from adaptra_megatron.transport.host_link.host_link_state import HostLinkState, Session
from adaptra_megatron.transport.host_link.host_link_writer import HostLinkWriter
from adaptra_megatron.transport.host_link.link_thread import LinkTask, ReadingThread, without
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.message_keys import MessageKey

ACKNOWLEDGED_TOGETHER = 8
SIGNALS_S = 0.5
"""Longest native wait of the main thread, which cannot handle signals meanwhile."""
_IDLE_S = 60.0
"""Longest sleep of the task while the link has no ring."""


class ReaderEvents(Protocol):
    """Callbacks of the reader to its link, with the lock held."""

    def take(self, event: Event, receipt: Receipt | None) -> None:
        """Handle an event, with its tensor if it is a message. Raises ValueError for an invalid one."""

    def given_up_from_s(self, key: MessageKey | None) -> float:
        """Return the time at which waiting for `key` (None: for all sends) fails."""

    def look_again_s(self, key: MessageKey | None, since_s: float, now_s: float) -> float:
        """Handle a wait that began at `since_s`; return when to call this again."""


class HostLinkReader:
    """Reader of all host-path sessions of a link, one after the other. Callers hold the lock, unless a method says
    otherwise."""

    def __init__(
        self,
        thread: ReadingThread,
        lock: threading.Lock,
        state: HostLinkState,
        copies: Copies,
        writer: HostLinkWriter,
        due: deque[int],
        events: ReaderEvents,
        settings: HostSettings,
    ) -> None:
        """`due`: sequence numbers that `writer` must acknowledge."""
        self._lock, self._state, self._copies = lock, state, copies
        self._writer, self._due, self._events = writer, due, events
        self._inbox = Inbox(
            max_message_nbytes=settings.max_message_nbytes,
            pooled_nbytes=copies.pooled_nbytes,
            window_nbytes=settings.window_nbytes,
            for_device=copies.by_parts,
        )
        self._awaited: tuple[Inbox, Ring] | None = None
        self._session: Session | None = None
        """Session that the thread reads, or has read to its end."""
        self.task = LinkTask(thread, lock, self._next_step, self._read_on)
        """Ends once the link and its ring are closed."""

    @property
    def doubles(self) -> int:
        """Number of duplicates that were dropped. With or without the lock."""
        return self._inbox.doubles

    def ask(self, key: MessageKey) -> None:
        """Receive a message in parts and directly, since its receive is posted. With or without the lock."""
        if self._copies.by_parts:
            ask(self._inbox, key)

    def wait_for(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None = None) -> bool:
        """Return whether `done()` became true by `deadline_s`, and before the wait failed.

        `key`: the awaited message; None: all sends.
        """
        # Other threads poke the ring to wake this one, which would otherwise sleep in native code.
        self._state.waiting = threading.get_ident()
        try:
            return self._read_until(done, deadline_s, key)
        finally:
            self._state.waiting = None
            self._inbox.leave()

    def _read_until(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None) -> bool:
        ended, state, since_s = None, self._state, time.monotonic()
        while not done():
            now_s = time.monotonic()
            # First: it may find that the device path has failed, and then the host path's state decides on this wait.
            look_again_s = self._events.look_again_s(key, since_s, now_s)
            until_s = min(deadline_s, self._events.given_up_from_s(key))
            if now_s >= until_s:
                return False
            until_s = max(now_s, min(until_s, look_again_s))
            session = state.session
            # A session that has ended delivers nothing more: wait for another.
            if session is None or session is ended:
                self._inbox.leave()  # the thread reads the session to its end, and only then the next
                state.state_changed.wait(until_s - now_s)
                continue
            # Python runs signal handlers in the main thread only, and not during a native wait.
            read_s = min(until_s, now_s + SIGNALS_S)
            take = partial(self._inbox.next, session.inbound, read_s, session.inbound.pokes, stays=True)
            if not without(self._lock, partial(self._read, session, take)):
                ended = session
        return True

    def _next_step(self) -> tuple[Inbox, Ring] | float | None:
        state = self._state
        if self._session is None or state.read_out:
            if state.session is None or state.session is self._session:
                if not state.closing:
                    return _IDLE_S
                self._session = self._awaited = None  # gives its rings back
                return None
            self._session, state.read_out = state.session, False
            self._awaited = self._inbox, self._session.inbound
        return self._awaited

    def _read_on(self, delivery: Delivery) -> Callable[[], None]:
        """Take what the session's ring has delivered to the thread. Call without the lock."""
        session = self._session
        assert session is not None
        return partial(self._end_if_over, session, self._read(session, delivery.event))

    def _end_if_over(self, session: Session, settle: Callable[[], bool]) -> None:
        """Record the end of the session once all of its data have been read."""
        if not settle():
            session.give_up(None)
            self._state.read_out = True
            self._state.on_fin()
            self._state.note_end()

    def _read(self, session: Session, take: Callable[[], Event | None]) -> Callable[[], bool]:
        """Take the next event of the inbound ring. Call without the lock.

        Returns a function to call with the lock; that returns False if this session delivers nothing more.
        """
        try:
            event = take()
        except RingClosedError:
            return partial(self._acknowledge, session, more=False)
        except (FrameError, RingError) as cause:
            there = self._state.ends.there
            sent = isinstance(cause, FrameError)
            what = f"{there} sent an invalid frame" if sent else f"the ring from {there} is corrupted"
            return partial(self._on_corrupted, session, f"{what}: {cause}")
        except MemoryError:
            return self._no_memory
        if event is None:
            return partial(self._acknowledge, session)
        # Before the lock is taken, since new memory may have to be page-locked, which waits for the device.
        return partial(self._take, session, event, self._received(event, session.inbound))

    def _on_corrupted(self, session: Session, cause: str) -> bool:
        self._state.corrupted(session, cause)
        return False

    def _no_memory(self) -> bool:
        self._state.fail(f"there is no memory for what {self._state.ends.there} sent")
        return False

    def _take(self, session: Session, event: Event, receipt: Receipt | None) -> bool:
        if receipt is not None or event.kind != Event.Kind.PART:
            try:
                self._events.take(event, receipt)
            except ValueError as cause:
                self._state.fail(f"{self._state.ends.there} sent an invalid message: {cause}")
                return False
        if receipt is not None:
            # A message that arrived whole proves that the ring works: only successive corruptions fail the link.
            self._state.consecutive_corruptions = 0
        return self._acknowledge(session)

    def _acknowledge(self, session: Session, *, more: bool = True) -> bool:
        """Write due acknowledgements, several at once while more events are ready, since each wakes the peer. Returns
        `more`.
        """
        due = len(self._due)
        if due and (due >= ACKNOWLEDGED_TOGETHER or not more or not session.inbound.backlog):
            self._writer.acknowledge()
        return more

    def _received(self, event: Event, ring: Ring) -> Receipt | None:
        """Return the message that this event completes; None if it completes none with a key. Call without the lock."""
        if event.kind == Event.Kind.PART:
            return self._copies.receive_part(event, type_of(event), ring)
        return self._copies.receive(tensor_of(event), event.block_nbytes) if is_tensor(event) else None
