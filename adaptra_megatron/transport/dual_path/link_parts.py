# SPDX-License-Identifier: Apache-2.0
"""What one end of a link is made of, and how its parts work together, all with the link's lock held.

A writer fills the outbound ring of the host path, and a reader empties the inbound ring into fresh tensors, each with a
thread of its own; queues keep what they carry, and `PathSwitch` says which path messages take. A message is
acknowledged when it has arrived and has been asked for, as a send over torch.distributed completes when its receive is
posted; until then its sender keeps it, and sends it again whenever the rings had to be replaced.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from adaptra_megatron.transport._ring import Event
from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.device_session.sessions import DeviceEvents, DevicePath
from adaptra_megatron.transport.dual_path.host_side import HostSide
from adaptra_megatron.transport.dual_path.two_paths import PathSwitch, SecondPath
from adaptra_megatron.transport.failover.control_channel import ControlChannel
from adaptra_megatron.transport.gpu.copies import Receipt
from adaptra_megatron.transport.gpu.cuda_device import Device
from adaptra_megatron.transport.gpu.device_copies import copies_for
from adaptra_megatron.transport.host_link.frames import is_probe, key_of, note_of
from adaptra_megatron.transport.host_link.reader import HostLinkReader
from adaptra_megatron.transport.host_link.receive_queue import Arrival, ReceiveQueue
from adaptra_megatron.transport.host_link.retransmit_queue import RetransmitQueue
from adaptra_megatron.transport.host_link.state import HostLinkState, Session
from adaptra_megatron.transport.host_link.writer import HostLinkWriter
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.messages import MessageKey, TransportError
from adaptra_megatron.transport.paths import PathSettings
from adaptra_megatron.transport.wires.registry import WIRES


class LinkParts:
    """Everything that the lock of one end of a link guards. Callers hold that lock."""

    def __init__(
        self,
        lock: threading.Lock,
        ends: LinkEnds,
        settings: HostSettings,
        device: Device | None,
        arrival_signal: ArrivalSignal,
        opens_s: float,
        second: SecondPath | None,
        events: DeviceEvents,
        payload_ready: Callable[[], None],
    ) -> None:
        """`events` and `payload_ready`, called without the lock: what the device path brings; the next message to send
        has begun to leave the device, or it cannot. For the others see DualLink.
        """
        self.has_device_path = second is not None
        if second is None:
            second = SecondPath(PathSettings(), _never, ControlChannel(_never))
        wire = WIRES.get(settings.transport)  # None: which it is to be has not been settled
        self.state = state = HostLinkState(
            ends, lock, settings.grace_s, one_network=wire is None or wire.one_network, opens_s=opens_s
        )
        self.retransmit_queue = RetransmitQueue(settings.window_messages, settings.window_nbytes)
        self.receive_queue = ReceiveQueue()
        due = self.receive_queue.due
        self.writer = HostLinkWriter(lock, state, self.retransmit_queue, due, settings.timeout_s)
        self.copies = copies_for(device, link=str(ends), pooled_nbytes=settings.pooled_nbytes, on_ready=payload_ready)
        self.reader = HostLinkReader(lock, state, self.copies, self.writer, due, self, settings)
        self.host = HostSide(state, self.retransmit_queue, self.copies, self.writer, due, second.mail)
        limits = {"meeting_s": second.settings.probe_limit_s, "timeout_s": settings.timeout_s}
        self.device_path = DevicePath(second.make_group, events, **limits)
        self.paths = PathSwitch(lock, state, second, self.host, self.device_path)
        self.micro_batches: int | None = None
        """Number of micro-batches of each replica, to name messages."""
        self._arrival_signal = arrival_signal
        self._awaited: MessageKey | None = None
        self._flushing = False

    # What the training thread asks for.

    def check_usable(self, key: MessageKey, now_s: float, *, receiving: bool) -> None:
        """Raises TransportError where no path could do what is asked for, unless the message is here."""
        by_device = self.paths.receiver.alive if receiving else self.paths.sender.device_healthy
        if now_s >= self._broken_from_s(by_device=by_device) and not (receiving and key in self.receive_queue):
            raise self.error(key, now_s, now_s, receiving=receiving)

    def ask_for(self, key: MessageKey, now_s: float) -> None:
        """A receive of `key` is posted."""
        if key not in self.receive_queue:
            self.reader.ask(key)
        self.receive_queue.post(key, now_s)
        if self.receive_queue.due:
            self.writer.acknowledge()

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[Arrival, float]:
        """A message that was asked for, and when it was. Raises TransportError if it is lost, or late."""
        self._awaited = key
        arrived = self.reader.wait_for(lambda: key in self.receive_queue, deadline_s, key)
        self._awaited = None
        if not arrived:
            raise self.error(key, self.receive_queue.posted_s(key), time.monotonic(), receiving=True)
        return self.receive_queue.pop(key)

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        """Do what having waited for `keys` since `since_s` calls for; returns when to call this again.

        Raises TransportError for one that is lost.
        """
        now_s = time.monotonic()
        again_s = math.inf
        for key in keys:
            until_s = self.given_up_from_s(key)
            if now_s >= until_s and key not in self.receive_queue:
                raise self.error(key, self.receive_queue.posted_s(key), now_s, receiving=True)
            again_s = min(again_s, until_s, self.look_again_s(key, since_s, now_s))
        return again_s

    def flush(self, deadline_s: float) -> None:
        """Wait until everything is acknowledged. Raises TransportError if it is not by the deadline."""
        self._flushing = True
        flushed = self.reader.wait_for(self._all_sent, deadline_s)
        self._flushing = False
        if not flushed:
            raise self._not_sent(time.monotonic())

    # What the host path and the device path bring.

    def begin(self, session: Session) -> None:
        """A session of the host path has begun: what is not acknowledged is sent again."""
        self.state.begin(session)
        self.state.health.up()
        self.retransmit_queue.rewind()
        self.writer.thread.wake()
        self.reader.thread.wake()
        self.paths.host_changed(up=True)

    def end(self, cause: str) -> None:
        """The session is over, or the attempt to begin one failed."""
        self.state.health.down(cause, time.monotonic())
        self.state.session = None
        self.state.note_end(cause)
        self.state.news.notify_all()
        self.paths.host_changed(up=False)

    def deliver(self, key: MessageKey, arrival: Arrival) -> None:
        """A message has come, by either path."""
        if not self.receive_queue.arrive(key, arrival):
            return
        self._arrival_signal.arrived(key)
        if key == self._awaited:
            self.state.notify_waiting()

    def note_came(self, number: int, packet: bytes) -> int:
        """A note has come; returns below which number all have. Raises ValueError for one that cannot be."""
        if not self.has_device_path:
            raise ValueError(f"note {number}, but this link has one path only")
        acknowledged_below = self.paths.note_came(number, packet)
        self._wake_if_flushed()
        return acknowledged_below

    def error(self, key: MessageKey, since_s: float, now_s: float, *, receiving: bool) -> TransportError:
        """The error for a message that has been under way since `since_s`."""
        doing = "waited for" if receiving else "could not send"
        told = self.has_device_path and not self.state.health.over
        also = self.paths.device_in_words(receiving=receiving) if told else ""
        spelled = key.spelled(self.micro_batches)
        return self.state.health.error(doing, spelled, since_s, now_s, receiving=receiving, also=also)

    # What the reader tells and asks.

    def take(self, event: Event, receipt: Receipt | None) -> None:
        """An event of the inbound ring. Raises ValueError for one that cannot be."""
        if receipt is not None:
            self.deliver(key_of(event), Arrival(event.sequence, receipt, event.arrived_s))
        elif event.kind == Event.Kind.ACK:
            self.paths.acknowledged(event.sequence)
            self._wake_if_flushed()
            if self.retransmit_queue.next_to_write() is not None:
                self.writer.thread.wake()
        elif event.kind == Event.Kind.BYE:
            self.state.heard_bye = True
            self.state.fin_received()
        elif event.kind == Event.Kind.REPEATED:
            self.receive_queue.arrive_again(event.sequence)
        else:
            self.receive_queue.due.append(event.sequence)
            if not is_probe(event):
                self.note_came(*note_of(event))
            elif self.has_device_path:
                self.paths.probed(event.iteration, event.arrived_s)
            else:
                raise ValueError("a probe, but this link has one path only")

    def given_up_from_s(self, key: MessageKey | None) -> float:
        """When waiting for `key` (None: for everything to be sent) stops making sense."""
        if key is not None:
            return self._broken_from_s(by_device=self.paths.receiver.expects(key))
        return self._broken_from_s(by_device=self.paths.sender.device_healthy and not len(self.retransmit_queue))

    def look_again_s(self, key: MessageKey | None, since_s: float, now_s: float) -> float:
        """When to look whether something has to be done for what has been waited for since `since_s`."""
        return self.paths.look_again_s(key, since_s, now_s)

    def _all_sent(self) -> bool:
        return not len(self.retransmit_queue) and not self.paths.sender.retained

    def _wake_if_flushed(self) -> None:
        if self._flushing and self._all_sent():
            self.state.notify_waiting()

    def _broken_from_s(self, *, by_device: bool) -> float:
        """When the link stops making sense. `by_device`: whether its device path could do what is asked for."""
        return math.inf if by_device and not self.state.health.over else self.state.health.broken_from_s()

    def _not_sent(self, now_s: float) -> TransportError:
        oldest = self.retransmit_queue.oldest()
        key, since_s = (None, now_s) if oldest is None else (oldest.key, oldest.posted_s)
        key = key if key is not None else self.paths.sender.oldest_retained()
        assert key is not None
        return self.error(key, since_s, now_s, receiving=False)


def _never(*_arguments: object) -> NoReturn:
    raise AssertionError("a link with the host path only makes no device session and says no note")
