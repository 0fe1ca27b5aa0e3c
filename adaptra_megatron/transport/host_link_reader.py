# SPDX-License-Identifier: Apache-2.0
"""The receiving half of one end of a link: events out of the inbound ring, by a thread and by whoever waits for one.

A waiting thread reads the ring too: a message that it waits for then wakes it at once, instead of waking the reading
thread that wakes it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from adaptra_megatron.transport._ring import Event, FrameError, Inbox, Ring, RingClosedError, RingError
from adaptra_megatron.transport.copies import Copies, Receipt
from adaptra_megatron.transport.frames import ask, is_tensor, tensor_of, type_of
from adaptra_megatron.transport.host_link_state import HostLinkState, Session
from adaptra_megatron.transport.host_link_writer import HostLinkWriter
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import MessageKey

ACKNOWLEDGED_TOGETHER = 8
SIGNALS_S = 0.5
"""How long a native wait may keep the main thread from handling a signal."""
_IDLE_S = 60.0
"""How long the thread looks for something in a silent ring, or for another ring, at a time."""


class ReaderEvents(Protocol):
    """What the reader tells and asks its link, with the lock held."""

    def take(self, event: Event, receipt: Receipt | None) -> None:
        """An event has come, with its tensor if it is a message. Raises ValueError for one that cannot be."""

    def given_up_from_s(self, key: MessageKey | None) -> float:
        """When waiting for `key` (None: for everything to be sent) stops making sense."""

    def look_again_s(self, key: MessageKey | None, now_s: float) -> float:
        """When to look whether something has to be done for what is waited for; does what has to be done now."""


class HostLinkReader:
    """All of a link's sessions, one after the other."""

    def __init__(
        self,
        state: HostLinkState,
        copies: Copies,
        writer: HostLinkWriter,
        due: deque[int],
        events: ReaderEvents,
        settings: HostSettings,
    ) -> None:
        """`due`: the sequence numbers that `writer` is to acknowledge."""
        self._state, self._copies, self._writer, self._due, self._events = state, copies, writer, due, events
        self._inbox = Inbox(
            max_message_nbytes=settings.max_message_nbytes,
            pooled_nbytes=copies.pooled_nbytes,
            window_nbytes=settings.window_nbytes,
            for_device=copies.by_parts,
        )
        self._new_session = threading.Condition(state.lock)
        self._thread = threading.Thread(
            target=self._read_until_closed, name=f"adaptra-host-receive-{state.peer}", daemon=True
        )

    @property
    def doubles(self) -> int:
        """Messages that came again and were dropped."""
        return self._inbox.doubles

    def start(self) -> None:
        """Begin. Ends by itself once the link closes and the ring does."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """There is a new session, or the link closes. The caller holds the lock."""
        self._new_session.notify_all()

    def ask(self, key: MessageKey) -> None:
        """A message is asked for before it is here: let it take the shortest way. With or without the lock."""
        if self._copies.by_parts:
            ask(self._inbox, key)

    def wait_for(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None = None) -> bool:
        """Whether `done` became true by the deadline, and before the link was broken. The caller holds the lock.

        `key`: what is waited for, None for everything to be sent.
        """
        self._state.waiting = threading.get_ident()
        try:
            return self._read_until(done, deadline_s, key)
        finally:
            self._state.waiting = None

    def _read_until(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None) -> bool:
        ended, state = None, self._state
        while not done():
            now_s = time.monotonic()
            look_again_s = self._events.look_again_s(key, now_s)
            until_s = min(deadline_s, self._events.given_up_from_s(key))
            if now_s >= until_s:
                return False
            until_s = max(now_s, min(until_s, look_again_s))
            session = state.session
            if session is None or session is ended:
                state.news.wait(until_s - now_s)
                continue
            seen_pokes = session.inbound.pokes
            state.lock.release()
            try:
                if not self._read(session, min(until_s, now_s + SIGNALS_S), seen_pokes, hurry=True):
                    ended = session
            finally:
                state.lock.acquire()
        return True

    def _read_until_closed(self) -> None:
        session, state = None, self._state
        while True:
            with state.lock:
                while state.session is None or state.session is session:
                    if state.closing:
                        return
                    self._new_session.wait(_IDLE_S)
                session, state.read_out = state.session, False
            while self._read(session, time.monotonic() + _IDLE_S):
                pass
            self._session_ended(session)

    def _session_ended(self, session: Session) -> None:
        """Everything of a session has been read."""
        state = self._state
        session.give_up(None)
        with state.lock:
            state.read_out = True
            state.note_farewell()
            state.note_end()

    def _read(self, session: Session, until_s: float, seen_pokes: int | None = None, hurry: bool = False) -> bool:
        """Handle one event of the inbound ring, or return after a while. False once it is closed and empty."""
        state = self._state
        try:
            event = self._inbox.next(session.inbound, until_s, seen_pokes, hurry)
        except RingClosedError:
            return False
        except (FrameError, RingError) as cause:
            sent = isinstance(cause, FrameError)
            what = f"stage {state.peer} sent what cannot be" if sent else f"the ring from stage {state.peer} is spoilt"
            with state.lock:
                state.spoilt(session, f"{what}: {cause}")
            return False
        except MemoryError:
            state.fail(f"there is no memory for what stage {state.peer} sent")
            return False
        if event is None:
            return True
        # Before the lock is taken, for new memory may have to be page-locked.
        receipt = self._received(event, session.inbound)
        if receipt is not None or event.kind != Event.Kind.PART:
            with state.lock:
                try:
                    self._events.take(event, receipt)
                except ValueError as cause:
                    state.health.fail(f"stage {state.peer} sent what cannot be: {cause}")
                    state.tell_waiting()
                    return False
                if receipt is not None:
                    state.spoilt_in_a_row = 0
                # Each acknowledgement wakes the peer: several go together while more messages come in anyway.
                due = len(self._due)
                if due and (due >= ACKNOWLEDGED_TOGETHER or not session.inbound.backlog):
                    self._writer.acknowledge()
        return True

    def _received(self, event: Event, ring: Ring) -> Receipt | None:
        """The message that is complete with this event; None where there is none with a key."""
        if event.kind == Event.Kind.PART:
            return self._copies.receive_part(event, type_of(event), ring)
        return self._copies.receive(tensor_of(event), event.block_nbytes) if is_tensor(event) else None
