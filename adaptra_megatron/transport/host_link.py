# SPDX-License-Identifier: Apache-2.0
"""The training process's end of the host path to one neighbour: a thread that fills the outbound ring, and one that
empties the inbound ring into fresh tensors.

The training thread only takes locks that are never held during a large copy or a wait. A message is acknowledged when
it has arrived and has been asked for, as a send over torch.distributed completes when its receive is posted; until
then its sender keeps it, and sends it again whenever the rings had to be replaced.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adaptra_megatron.transport._ring import Description, Event, FrameError, Inbox, Ring, RingClosedError, RingError
from adaptra_megatron.transport.arrivals import Arrival, Arrivals
from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.cuda_device import Computed
from adaptra_megatron.transport.device_copies import Payload, Receipt, copies_for
from adaptra_megatron.transport.frames import (
    check_can_travel,
    describe,
    describe_note,
    describe_probe,
    is_probe,
    is_tensor,
    key_of,
    note_of,
    tensor_of,
)
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_health import LinkHealth
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.outbox import Outbox, Outgoing
from adaptra_megatron.transport.paths import Path

logger = logging.getLogger("adaptra_megatron.transport.host_link")

CPU = torch.device("cpu")
IDLE_S = 60.0
"""How long an idle thread sleeps when nobody wakes it."""
FAREWELL_S = 1.0
"""How long closing waits for the last acknowledgements to be written."""
SIGNALS_S = 0.5
"""How long a native wait may keep the main thread from handling a signal."""
ACKNOWLEDGED_TOGETHER = 8
INLINE_NBYTES = 1 << 16
"""What the posting thread writes itself if that needs no waiting: waking another thread would take longer."""


class _Outcome(enum.Enum):
    WRITTEN = enum.auto()
    FULL = enum.auto()
    """Nothing, or a part, is in the ring at the deadline."""
    FAILED = enum.auto()
    """The device does not give it away."""
    CLOSED = enum.auto()


@dataclass(frozen=True)
class _Session:
    """The rings between two breaks of the link."""

    outbound: Ring
    inbound: Ring


class HostLink:
    """Both directions between this stage and `peer`. Made known to the supervisor, which brings it up."""

    def __init__(
        self, stage: int, peer: int, settings: HostSettings, device: torch.device = CPU, bell: Bell | None = None
    ) -> None:
        """`device`: where the tensors are that are sent, and that received ones are to be brought to. `bell`: is told
        of all that arrives."""
        self.sessions = 0
        """How often the link came up."""
        self._stage, self._peer, self._settings = stage, peer, settings
        self._outbox = Outbox(settings.window_messages, settings.window_nbytes)
        self._arrivals = Arrivals()
        self._posted = 0
        self._awaited: MessageKey | None = None
        self._bell = bell if bell is not None else Bell()
        self._flushing = False
        self._waiting: int | None = None
        self._session: _Session | None = None
        self._writing = False
        self._heard_bye = False
        self._health = LinkHealth(stage, peer, settings.grace_s, time.monotonic())
        self._closing = False
        self._lock = threading.Lock()
        self._to_write = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._new_session = threading.Condition(self._lock)
        self._copies = copies_for(
            device,
            link=f"{stage}<->{peer}",
            window_nbytes=settings.window_nbytes,
            pooled_nbytes=settings.pooled_nbytes,
            unit_nbytes=settings.slot_nbytes,
            on_ready=self._can_be_written,
        )
        pooled_nbytes = self._copies.pooled_nbytes
        self._inbox = Inbox(max_message_nbytes=settings.max_message_nbytes, pooled_nbytes=pooled_nbytes)
        self._threads = [
            threading.Thread(target=self._write_until_closed, name=f"adaptra-host-send-{peer}", daemon=True),
            threading.Thread(target=self._read_until_closed, name=f"adaptra-host-receive-{peer}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # What the training thread calls.

    def wait_until_up(self, deadline_s: float) -> None:
        """Raises TransportError if the link does not come up in time."""
        with self._lock:
            while self._session is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._health.not_up_error()
                self._news.wait(left_s)

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        """Returns when it was posted. Raises TransportError for what cannot travel and where the link is broken."""
        outgoing = self._outgoing(key, tensor)
        now_s = time.monotonic()
        with self._lock:
            if now_s >= self._health.broken_from_s():
                raise self._health.error("could not send", key, now_s, now_s, receiving=False)
            self._enqueue(key, self._copies.stage(outgoing), self._posted, now_s)
            self._posted += 1
        return MessageTimes(key, self._peer, now_s, now_s, tensor.nbytes, Path.HOST)

    def describe(self, specification: TensorSpecification) -> None:
        """Say what the messages to come look like, for a path on which they do not say so themselves."""

    def post_receive(self, key: MessageKey) -> None:
        now_s = time.monotonic()
        with self._lock:
            if key not in self._arrivals and now_s >= self._health.broken_from_s():
                raise self._health.error("waited for", key, now_s, now_s, receiving=True)
            self._ask_for(key, now_s)

    def ready(self, key: MessageKey) -> bool:
        return key in self._arrivals

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        """Do what having waited for `keys` since `since_s` calls for; returns when to call this again.

        Raises TransportError for one that is lost.
        """
        with self._lock:
            now_s = time.monotonic()
            again_s = math.inf
            for key in keys:
                until_s = self._given_up_from_s(key)
                if now_s >= until_s and key not in self._arrivals:
                    raise self._not_received(key, self._arrivals.posted_s(key), now_s)
                again_s = min(again_s, until_s, self._look_again_s(key, now_s))
            return again_s

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        with self._lock:
            self._awaited = key
            arrived = self._wait_for(lambda: key in self._arrivals, deadline_s, key)
            self._awaited = None
            if not arrived:
                raise self._not_received(key, self._arrivals.posted_s(key), time.monotonic())
            arrival, posted_s = self._arrivals.pop(key)
        tensor = arrival.receipt.take()
        path = Path.DEVICE if arrival.sequence is None else Path.HOST
        return tensor, MessageTimes(key, self._peer, posted_s, arrival.arrived_s, tensor.nbytes, path)

    def flush(self, deadline_s: float) -> None:
        with self._lock:
            self._flushing = True
            flushed = self._wait_for(self._all_sent, deadline_s)
            self._flushing = False
            if not flushed:
                raise self._not_sent(time.monotonic())

    def close(self) -> None:
        """Say what is still to be said to the peer, then end the threads. Safe to call twice."""
        with self._lock:
            self._closing = True
            self._to_write.notify_all()
            self._new_session.notify_all()
        writer, reader = self._threads
        writer.join(2 * FAREWELL_S)
        if (session := self._session) is not None:
            session.outbound.close()
            session.inbound.close()
        reader.join(FAREWELL_S)
        self._copies.close(FAREWELL_S)

    @property
    def unacknowledged(self) -> int:
        """Messages that are kept to be sent again."""
        with self._lock:
            return len(self._outbox)

    @property
    def doubles(self) -> int:
        """Messages that came again and were dropped."""
        return self._inbox.doubles + self._arrivals.doubles

    # What the supervisor calls.

    @property
    def finished(self) -> bool:
        return self._heard_bye or self._closing

    def connected(self, outbound: Ring, inbound: Ring) -> None:
        with self._lock:
            self._session = _Session(outbound, inbound)
            self._health.up()
            self.sessions += 1
            self._outbox.rewind()
            self._to_write.notify_all()
            self._new_session.notify_all()
            self._news.notify_all()
        if self.sessions > 1:
            logger.info("stage %d, link to stage %d: the host path is up again", self._stage, self._peer)

    def disconnected(self, cause: str) -> None:
        with self._lock:
            self._health.down(cause, time.monotonic())
            self._session = None
            self._news.notify_all()

    # What both call.

    def _outgoing(self, key: MessageKey, tensor: torch.Tensor) -> Computed:
        """What to send, checked. Raises TransportError for what cannot travel."""
        check_can_travel(key, tensor, self._copies.device, self._settings.max_message_nbytes)
        # An alias: Megatron's deallocate_output_tensor swaps the storage under the caller's tensor.
        return self._copies.computed(tensor.detach().contiguous())

    def _enqueue(
        self, key: MessageKey | None, payload: Payload, number: int, now_s: float, *, probe: bool = False
    ) -> None:
        """Send a message, or a note or a probe (no key). The caller holds the lock."""
        message = self._outbox.post(key, payload, number, now_s, probe=probe)
        if payload.nbytes > INLINE_NBYTES or not self._write_at_once(message):
            self._to_write.notify()

    def _ask_for(self, key: MessageKey, now_s: float) -> None:
        """The caller holds the lock."""
        self._arrivals.post(key, now_s)
        if self._arrivals.due:
            self._acknowledge()

    # The two threads.

    def _write_until_closed(self) -> None:
        while True:
            with self._lock:
                while (work := self._next_work()) is None:
                    if self._closing:
                        self._say_bye()
                        return
                    self._to_write.wait(IDLE_S)
                self._writing = True
                session = self._session
                assert session is not None
            outcome = self._write(session, work, time.monotonic() + self._settings.timeout_s)
            with self._lock:
                self._writing = False
                self._settle(session, work, outcome)
            del work  # or an idle thread would hold the last tensor

    def _next_work(self) -> Outgoing | int | None:
        """An acknowledgement (its sequence number) before any message. The caller holds the lock."""
        if self._session is None:
            return None
        if self._arrivals.due:
            return self._arrivals.due.popleft()
        message = None if self._closing else self._outbox.next_to_write()
        if message is None or not message.payload.ready:
            return None
        self._outbox.mark_written(message)
        return message

    def _write(self, session: _Session, work: Outgoing | int, deadline_s: float) -> _Outcome:
        """Into the ring, by `deadline_s`."""
        try:
            if isinstance(work, int):
                session.outbound.write_ack(work, deadline_s)
            else:
                description, payload = _description(work), work.payload
                for begin, end in payload.parts():
                    address = payload.address(end, deadline_s)
                    session.outbound.write(description, address, payload.nbytes, deadline_s, begin, end)
        except TimeoutError:
            return _Outcome.FULL
        except TransportError as cause:
            self._health.fail(str(cause))
            return _Outcome.FAILED
        except RingError:
            return _Outcome.CLOSED
        return _Outcome.WRITTEN

    def _settle(self, session: _Session, work: Outgoing | int, outcome: _Outcome) -> None:
        """What does not get in is due again. The caller holds the lock."""
        if outcome is _Outcome.CLOSED and self._session is session:
            # The next session has other rings, and begins with all that is not acknowledged.
            self._session = None
            self._health.down("its rings were closed", time.monotonic())
        elif outcome is _Outcome.FAILED:
            self._tell_waiting()
        elif outcome is _Outcome.FULL and self._session is session:
            if isinstance(work, int):
                self._arrivals.due.append(work)
            else:
                self._outbox.mark_unwritten(work)
            self._to_write.notify()

    def _write_at_once(self, message: Outgoing) -> bool:
        """Write on the calling thread, which holds the lock, if nothing is before it and nothing has to wait."""
        session = self._session
        if session is None or self._writing or not message.payload.ready:
            return False
        if self._outbox.next_to_write() is not message:
            return False
        self._outbox.mark_written(message)
        self._settle(session, message, self._write(session, message, 0.0))
        return True

    def _acknowledge(self) -> None:
        """Write what is due, or have it written. The caller holds the lock."""
        session = self._session
        if self._writing or session is None:
            self._to_write.notify()
            return
        for _ in range(len(self._arrivals.due)):
            sequence = self._arrivals.due.popleft()
            self._settle(session, sequence, self._write(session, sequence, 0.0))

    def _say_bye(self) -> None:
        if self._session is not None:
            try:
                self._session.outbound.write_bye(time.monotonic() + FAREWELL_S)
            except (RingError, TimeoutError) as cause:
                logger.debug("stage %d: no farewell to stage %d: %s", self._stage, self._peer, cause)

    def _read_until_closed(self) -> None:
        session = None
        while True:
            with self._lock:
                while self._session is None or self._session is session:
                    if self._closing:
                        return
                    self._new_session.wait(IDLE_S)
                session = self._session
            while self._read(session, time.monotonic() + IDLE_S):
                pass
            self._session_ended()

    def _session_ended(self) -> None:
        """Everything of a session has been read."""
        if not self.finished:
            logger.warning(
                "stage %d, link to stage %d: the host path is down (%s); reconnecting",
                *(self._stage, self._peer, self._health.cause),
            )
        with self._lock:
            # Not before: over several connections, a farewell may overtake what was sent before it.
            self._health.said_bye = self._heard_bye
            self._news.notify_all()

    def _read(self, session: _Session, until_s: float, seen_pokes: int | None = None, hurry: bool = False) -> bool:
        """Handle one event of the inbound ring, or return after a while. False once it is closed and empty."""
        try:
            event = self._inbox.next(session.inbound, until_s, seen_pokes, hurry)
        except RingClosedError:
            return False
        except (FrameError, RingError) as cause:
            self._fail(f"stage {self._peer} sent what cannot be: {cause}")
            return False
        except MemoryError:
            self._fail(f"there is no memory for what stage {self._peer} sent")
            return False
        if event is not None:
            # Before the lock is taken, for new memory may have to be page-locked.
            receipt = self._copies.receive(tensor_of(event)) if is_tensor(event) else None
            with self._lock:
                try:
                    self._take(event, receipt)
                except ValueError as cause:
                    self._health.fail(f"stage {self._peer} sent what cannot be: {cause}")
                    self._news.notify_all()
                    return False
                # Each acknowledgement wakes the peer: several go together while more messages come in anyway.
                due = len(self._arrivals.due)
                if due and (due >= ACKNOWLEDGED_TOGETHER or not session.inbound.backlog):
                    self._acknowledge()
        return True

    def _fail(self, cause: str) -> None:
        with self._lock:
            self._health.fail(cause)
            self._news.notify_all()

    def _take(self, event: Event, receipt: Receipt | None) -> None:
        """The caller holds the lock."""
        if receipt is not None:
            self._deliver(key_of(event), Arrival(event.sequence, receipt, event.arrived_s))
        elif event.kind == Event.Kind.ACK:
            self._acknowledged(event.sequence)
            if self._flushing and self._all_sent():
                self._tell_waiting()
            elif self._outbox.next_to_write() is not None:
                self._to_write.notify()
        elif event.kind == Event.Kind.BYE:
            self._heard_bye = True
        elif event.kind == Event.Kind.REPEATED:
            self._arrivals.arrive_again(event.sequence)
        else:
            self._arrivals.due.append(event.sequence)
            if is_probe(event):
                self._probed(event.iteration, event.arrived_s)
            else:
                self._heard(*note_of(event))

    def _can_be_written(self) -> None:
        """The next message has begun to leave the device, or it cannot."""
        with self._lock:
            self._to_write.notify()

    def _deliver(self, key: MessageKey, arrival: Arrival) -> None:
        """The caller holds the lock."""
        if not self._arrivals.arrive(key, arrival):
            return
        self._bell.arrived(key)
        if key == self._awaited:
            self._tell_waiting()

    # What a link with a second path does differently; the lock is held.

    def _acknowledged(self, sequence: int) -> None:
        """The peer has, and needs, what was sent with this number."""
        self._outbox.acknowledge(sequence)

    def _heard(self, number: int, packet: bytes) -> None:
        """A note has come. Raises ValueError for one that cannot be."""
        raise ValueError(f"note {number} came, but this link has one path only")

    def _probed(self, number: int, arrived_s: float) -> None:
        """A probe has come. Raises ValueError: nobody measures a link that has one path only."""
        raise ValueError(f"probe {number} came, but this link has one path only")

    def _all_sent(self) -> bool:
        return not len(self._outbox)

    def _given_up_from_s(self, key: MessageKey | None) -> float:
        """When waiting for `key` (None: for everything to be sent) stops making sense."""
        return self._health.broken_from_s()

    def _look_again_s(self, key: MessageKey | None, now_s: float) -> float:
        """When to look whether something has to be done for what is waited for."""
        return math.inf

    def _not_received(self, key: MessageKey, since_s: float, now_s: float) -> TransportError:
        return self._health.error("waited for", key, since_s, now_s, receiving=True)

    def _not_sent(self, now_s: float) -> TransportError:
        oldest = self._outbox.oldest()
        assert oldest is not None
        assert oldest.key is not None
        return self._health.error("could not send", oldest.key, oldest.posted_s, now_s, receiving=False)

    def _tell_waiting(self) -> None:
        """Wake the training thread, wherever it waits, unless it is the caller, who holds the lock."""
        if self._waiting is None or self._waiting == threading.get_ident():
            return
        self._news.notify_all()
        if self._session is not None:
            self._session.inbound.poke()

    def _wait_for(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None = None) -> bool:
        """Whether `done` became true by the deadline, and before the link was broken. The caller holds the lock.

        The waiting thread reads the ring too: a message that it waits for then wakes it at once, instead of waking
        the reading thread that wakes it.
        """
        self._waiting = threading.get_ident()
        try:
            return self._read_until(done, deadline_s, key)
        finally:
            self._waiting = None

    def _read_until(self, done: Callable[[], bool], deadline_s: float, key: MessageKey | None) -> bool:
        ended = None
        while not done():
            now_s = time.monotonic()
            look_again_s = self._look_again_s(key, now_s)
            until_s = min(deadline_s, self._given_up_from_s(key))
            if now_s >= until_s:
                return False
            until_s = max(now_s, min(until_s, look_again_s))
            session = self._session
            if session is None or session is ended:
                self._news.wait(until_s - now_s)
                continue
            seen_pokes = session.inbound.pokes
            self._lock.release()
            try:
                if not self._read(session, min(until_s, now_s + SIGNALS_S), seen_pokes, hurry=True):
                    ended = session
            finally:
                self._lock.acquire()
        return True


def _description(work: Outgoing) -> Description:
    if work.key is None and work.probe:
        return describe_probe(work.sequence, work.number, work.payload)
    if work.key is None:
        return describe_note(work.sequence, work.number, work.payload)
    return describe(work.sequence, work.key, work.payload)
