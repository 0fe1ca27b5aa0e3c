# SPDX-License-Identifier: Apache-2.0
"""Sending half of one end of a link: writes acknowledgements and a retransmit queue's messages into the outbound ring.

A thread writes what does not fit at once, a part at a time. Small messages that find room are written by the thread
that posts them, or takes the acknowledgement that lets them follow.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Description, Ring, RingClosedError, RingError
from adaptra_megatron.transport.gpu.copies import PATIENCE_S
from adaptra_megatron.transport.host_link.frames import describe, describe_note, describe_probe
from adaptra_megatron.transport.host_link.host_link_state import HostLinkState, Session
from adaptra_megatron.transport.host_link.link_thread import LinkTask, Work, WritingThread
from adaptra_megatron.transport.host_link.message_queues import Outgoing, RetransmitQueue
from adaptra_megatron.transport.message_keys import TransportError

logger = logger_of(__name__)

FIN_S = 1.0
"""Longest time for closing to write the last acknowledgements and FIN."""
INLINE_NBYTES = 1 << 16
"""Largest message that is written without the thread if there is room: waking it would take longer."""
_IDLE_S = 60.0
"""Longest sleep of the thread without a signal."""


class _Outcome(enum.Enum):
    WRITTEN = enum.auto()
    PART = enum.auto()
    """Part of it was written; the rest has its turn after other links."""
    FULL = enum.auto()
    """The ring had no room for the rest of it."""
    FAILED = enum.auto()
    """The device failed."""
    CLOSED = enum.auto()
    CORRUPTED = enum.auto()
    """The ring holds invalid data, which no process of ours writes."""


class HostLinkWriter:
    """Writer of the outbound ring of a link. Callers hold the lock, unless a method says otherwise."""

    def __init__(
        self,
        thread: WritingThread,
        lock: threading.Lock,
        state: HostLinkState,
        retransmit_queue: RetransmitQueue,
        due: deque[int],
        timeout_s: float,
    ) -> None:
        """`due`: sequence numbers to acknowledge, in order; `timeout_s`: longest write of a message that a device
        copies.
        """
        self._state, self._retransmit_queue, self._due, self._timeout_s = state, retransmit_queue, due, timeout_s
        self._writing = False
        self._cause = ""
        """Cause of the last FAILED or CORRUPTED outcome."""
        self._reached = 0
        """Offset in its message at which the last PART or FULL outcome ended."""
        self._full: Session | None = None
        """Session whose ring had no room left."""
        self._fin_until_s: float | None = None
        self.task = LinkTask(thread, lock, self._next_step)
        """Ends, after FIN to the peer, once the link closes."""

    def write_on(self) -> None:
        """Write the next messages while they are small and find room; leave the others to the thread."""
        while (message := self._retransmit_queue.next_to_write()) is not None:
            session, payload = self._state.session, message.payload
            small = payload.inline and payload.nbytes <= INLINE_NBYTES
            # While the thread writes, no other may: a ring has one producer.
            if session is None or session is self._full or self._writing or not small:
                self.task.wake()
                return
            self._retransmit_queue.mark_written(message)
            self._settle(session, message, self._write(session, message, 0.0))

    def acknowledge(self, *more: int) -> None:
        """Write due acknowledgements and these, or wake the thread to do so."""
        self._due.extend(more)
        session = self._state.session
        # The thread writes without the lock; a ring has one producer at a time.
        if self._writing or session is None:
            self.task.wake()
            return
        for _ in range(len(self._due)):
            sequence = self._due.popleft()
            self._settle(session, sequence, self._write(session, sequence, 0.0))

    def _next_step(self) -> Work[None] | Ring | float | None:
        session = self._state.session
        if session is not None and self._full is session:
            self._full = None  # once there is room, this is asked again
            return session.outbound
        due = self._next_due()
        if session is not None and due is not None:
            self._writing = True
            return partial(self._write_due, session, due)
        return self._send_fin() if self._state.closing else _IDLE_S

    def _write_due(self, session: Session, due: Outgoing | int) -> Callable[[], None]:
        """Write acknowledgements. Without the lock."""
        outcome = self._write(session, due, time.monotonic() + self._timeout_s)
        return partial(self._written, session, due, outcome)

    def _written(self, session: Session, due: Outgoing | int, outcome: _Outcome) -> None:
        self._writing = False
        self._settle(session, due, outcome)

    def _next_due(self) -> Outgoing | int | None:
        """Return the next acknowledgement (a sequence number) or, without any, the next message."""
        if self._state.session is None:
            return None
        # Acknowledgements first: the peer's window may be full until it gets them.
        if self._due:
            return self._due.popleft()
        message = None if self._state.closing else self._retransmit_queue.next_to_write()
        if message is None or not message.payload.ready:
            return None
        self._retransmit_queue.mark_written(message)
        return message

    def _write(self, session: Session, work: Outgoing | int, deadline_s: float) -> _Outcome:
        """Write one item, or a part of it; only a device is waited for, until `deadline_s`. With or without the lock;
        with it, the deadline has passed.
        """
        try:
            if isinstance(work, int):
                session.outbound.write_ack(work, min(deadline_s, time.monotonic() + PATIENCE_S))
            else:
                begun_at = work.written_nbytes
                self._reached = work.payload.write(session.outbound, _description(work), deadline_s, begun_at)
                if self._reached <= work.payload.nbytes:
                    return _Outcome.PART if self._reached > begun_at else _Outcome.FULL
        except TimeoutError:
            self._reached = 0
            return _Outcome.FULL
        except TransportError as cause:
            self._cause = str(cause)
            return _Outcome.FAILED
        except RingClosedError:
            return _Outcome.CLOSED
        except RingError as cause:
            self._cause = f"the ring to {self._state.ends.there} is corrupted: {cause}"
            return _Outcome.CORRUPTED
        return _Outcome.WRITTEN

    def _settle(self, session: Session, work: Outgoing | int, outcome: _Outcome) -> None:
        """Record the outcome; unwritten items are due again."""
        state = self._state
        if outcome is _Outcome.CLOSED and state.session is session:
            # The next session has other rings, and begins with all that is not acknowledged.
            state.session = None
            state.down("its rings were closed", time.monotonic())
            session.give_up(None)
        elif outcome is _Outcome.CORRUPTED:
            state.corrupted(session, self._cause)
        elif outcome is _Outcome.FAILED:
            state.fail(self._cause)
        elif outcome in (_Outcome.FULL, _Outcome.PART) and state.session is session:
            if outcome is _Outcome.FULL:
                self._full = session
            if isinstance(work, int):
                # Order does not matter: each acknowledges its own message.
                self._due.append(work)
            else:
                # In this session only: the next one begins with the whole message.
                work.written_nbytes = max(work.written_nbytes, self._reached)
                self._retransmit_queue.mark_unwritten(work)
            self.task.wake()

    def _send_fin(self) -> Ring | None:
        """Write FIN, unless there is no room for it within FIN_S; return the ring to wait for, None once this is
        over.
        """
        session, now_s = self._state.session, time.monotonic()
        if session is None:
            return None
        if self._fin_until_s is None:
            self._fin_until_s = now_s + FIN_S
        try:
            session.outbound.write_bye(0.0)
        except TimeoutError as cause:
            if now_s < self._fin_until_s:
                return session.outbound
            logger.debug("link %s: no FIN to %s: %s", self._state.ends, self._state.ends.there, cause)
        except RingError as cause:
            logger.debug("link %s: no FIN to %s: %s", self._state.ends, self._state.ends.there, cause)
        return None


def _description(work: Outgoing) -> Description:
    if work.key is None and work.probe:
        return describe_probe(work.sequence, work.number, work.payload)
    if work.key is None:
        return describe_note(work.sequence, work.number, work.payload)
    return describe(work.sequence, work.key, work.payload)
