# SPDX-License-Identifier: Apache-2.0
"""The sending half of one end of a link: acknowledgements and an outbox's messages into the outbound ring.

A thread does what may have to wait. What is small, and finds room at once, the posting thread writes itself.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque

from adaptra_megatron.transport._ring import Description, RingClosedError, RingError
from adaptra_megatron.transport.copies import Payload
from adaptra_megatron.transport.frames import describe, describe_note, describe_probe
from adaptra_megatron.transport.host_link_state import HostLinkState, Session
from adaptra_megatron.transport.messages import MessageKey, TransportError
from adaptra_megatron.transport.outbox import Outbox, Outgoing

logger = logging.getLogger("adaptra_megatron.transport.host_link_writer")

FAREWELL_S = 1.0
"""How long closing waits for the last acknowledgements to be written."""
INLINE_NBYTES = 1 << 16
"""What the posting thread writes itself if that needs no waiting: waking another thread would take longer."""
_IDLE_S = 60.0
"""How long the thread sleeps when nobody wakes it."""


class _Outcome(enum.Enum):
    WRITTEN = enum.auto()
    FULL = enum.auto()
    """Nothing, or a part, is in the ring at the deadline."""
    FAILED = enum.auto()
    """The device does not give it away."""
    CLOSED = enum.auto()
    SPOILT = enum.auto()
    """There is what cannot be in the ring."""


class HostLinkWriter:
    """Callers hold the link's lock, unless it says otherwise."""

    def __init__(self, state: HostLinkState, outbox: Outbox, due: deque[int], timeout_s: float) -> None:
        """`due`: sequence numbers to acknowledge, in order; `timeout_s`: longest wait for room in the ring."""
        self._state, self._outbox, self._due, self._timeout_s = state, outbox, due, timeout_s
        self._writing = False
        self._cause = ""
        """What is wrong with a ring that is spoilt."""
        self._to_write = threading.Condition(state.lock)
        self._thread = threading.Thread(
            target=self._write_until_closed, name=f"adaptra-host-send-{state.peer}", daemon=True
        )

    def start(self) -> None:
        """Begin, without the lock. Ends by itself once the link closes, after a farewell to the peer."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, without the lock."""
        self._thread.join(2 * FAREWELL_S)

    def wake(self) -> None:
        """There may be something to write, or the link closes."""
        self._to_write.notify()

    def payload_ready(self) -> None:
        """The next message has begun to leave the device, or it cannot. Without the lock."""
        with self._state.lock:
            self._to_write.notify()

    def enqueue(
        self, key: MessageKey | None, payload: Payload, number: int, now_s: float, *, probe: bool = False
    ) -> None:
        """Send a message, or a note or a probe (no key)."""
        message = self._outbox.post(key, payload, number, now_s, probe=probe)
        if payload.nbytes > INLINE_NBYTES or not self._write_at_once(message):
            self._to_write.notify()

    def acknowledge(self) -> None:
        """Write what is due, or have it written."""
        session = self._state.session
        if self._writing or session is None:
            self._to_write.notify()
            return
        for _ in range(len(self._due)):
            sequence = self._due.popleft()
            self._settle(session, sequence, self._write(session, sequence, 0.0))

    def _write_at_once(self, message: Outgoing) -> bool:
        """Whether the message was nobody's turn but its own, and needed no waiting."""
        session = self._state.session
        if session is None or self._writing or not message.payload.inline:
            return False
        if self._outbox.next_to_write() is not message:
            return False
        self._outbox.mark_written(message)
        self._settle(session, message, self._write(session, message, 0.0))
        return True

    def _write_until_closed(self) -> None:
        while True:
            with self._state.lock:
                while (work := self._next_work()) is None:
                    if self._state.closing:
                        self._say_bye()
                        return
                    self._to_write.wait(_IDLE_S)
                self._writing = True
                session = self._state.session
                assert session is not None
            outcome = self._write(session, work, time.monotonic() + self._timeout_s)
            with self._state.lock:
                self._writing = False
                self._settle(session, work, outcome)
            del work  # or an idle thread would hold the last tensor

    def _next_work(self) -> Outgoing | int | None:
        """An acknowledgement (its sequence number) before any message."""
        if self._state.session is None:
            return None
        if self._due:
            return self._due.popleft()
        message = None if self._state.closing else self._outbox.next_to_write()
        if message is None or not message.payload.ready:
            return None
        self._outbox.mark_written(message)
        return message

    def _write(self, session: Session, work: Outgoing | int, deadline_s: float) -> _Outcome:
        """Into the ring, by `deadline_s`. With or without the lock; with it, the deadline has passed."""
        try:
            if isinstance(work, int):
                session.outbound.write_ack(work, deadline_s)
            else:
                work.payload.write(session.outbound, _description(work), deadline_s)
        except TimeoutError:
            return _Outcome.FULL
        except TransportError as cause:
            self._state.health.fail(str(cause))
            return _Outcome.FAILED
        except RingClosedError:
            return _Outcome.CLOSED
        except RingError as cause:
            self._cause = f"the ring to stage {self._state.peer} is spoilt: {cause}"
            return _Outcome.SPOILT
        return _Outcome.WRITTEN

    def _settle(self, session: Session, work: Outgoing | int, outcome: _Outcome) -> None:
        """What does not get in is due again."""
        state = self._state
        if outcome is _Outcome.CLOSED and state.session is session:
            # The next session has other rings, and begins with all that is not acknowledged.
            state.session = None
            state.health.down("its rings were closed", time.monotonic())
            session.give_up(None)
        elif outcome is _Outcome.SPOILT:
            state.spoilt(session, self._cause)
        elif outcome is _Outcome.FAILED:
            state.tell_waiting()
        elif outcome is _Outcome.FULL and state.session is session:
            if isinstance(work, int):
                self._due.append(work)
            else:
                self._outbox.mark_unwritten(work)
            self._to_write.notify()

    def _say_bye(self) -> None:
        session = self._state.session
        if session is not None:
            try:
                session.outbound.write_bye(time.monotonic() + FAREWELL_S)
            except (RingError, TimeoutError) as cause:
                logger.debug("stage %d: no farewell to stage %d: %s", self._state.stage, self._state.peer, cause)


def _description(work: Outgoing) -> Description:
    if work.key is None and work.probe:
        return describe_probe(work.sequence, work.number, work.payload)
    if work.key is None:
        return describe_note(work.sequence, work.number, work.payload)
    return describe(work.sequence, work.key, work.payload)
