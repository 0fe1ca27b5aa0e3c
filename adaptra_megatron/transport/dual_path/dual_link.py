# SPDX-License-Identifier: Apache-2.0
"""One end of the link to a peer, in the training process: its host path and, if there is one, its device path.

Rules that a link keeps towards its transport:

1. Each posted message reaches the peer once. The sender keeps it until the peer has acknowledged it. After any failure
   all unacknowledged messages are sent again, and the receiver drops duplicates.
2. A message is acknowledged once it has arrived *and* its receive is posted, which is also when a send over
   torch.distributed completes. So a slow receiver holds the sender's tensors, not memory of its own.
3. Each message is expected on exactly one path: both ends agree on the number from which the other path is used.
4. A wait ends with an error once no path can bring the message: see LinkHealth.broken_from_s for the grace of each
   cause. While one path works, a failure of the other is only logged.
5. The first cause of an end counts; later ones follow from it and are dropped.
6. There is one lock per end. DualLink takes it; parts are called with it held. Copies, NCCL calls and waits
   for the peer happen without it, so the training thread never waits at the lock for one of them.

A link is opened again by a new object: nothing of an earlier opening is delivered.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Event, Ring
from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.dual_path.two_paths import PathSwitch, SecondPath
from adaptra_megatron.transport.gpu.copies import Receipt
from adaptra_megatron.transport.gpu.cuda_device import Computed, Device
from adaptra_megatron.transport.gpu.host_copies import copies_for
from adaptra_megatron.transport.host_link.frames import check_can_travel, is_probe, key_of, note_of
from adaptra_megatron.transport.host_link.host_link_reader import HostLinkReader
from adaptra_megatron.transport.host_link.host_link_state import GiveUp, HostLinkState, Session
from adaptra_megatron.transport.host_link.host_link_writer import FIN_S, HostLinkWriter
from adaptra_megatron.transport.host_link.link_thread import LinkThreads, WritingThread
from adaptra_megatron.transport.host_link.message_queues import MessageArrival, ReceiveQueue, RetransmitQueue
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import Path, PathCounters, PathSettings, ProbeTimes
from adaptra_megatron.transport.message_keys import (
    Direction,
    MessageKey,
    MessageTimes,
    TensorSpecification,
    TransportError,
)
from adaptra_megatron.transport.wires.wire_registry import WIRES


def _never(*_arguments: object) -> NoReturn:
    raise AssertionError("a link with the host path only makes no device session and says no note")


logger = logger_of(__name__)

GREETING = MessageKey(0, Direction.ACTIVATION, (1 << 16) - 1, 0)
"""Key of the greeting: no model has so many chunks."""


class DualLink:
    """One end of the link to a peer, both directions. The supervisor brings it up.

    It owns the lock that guards all its parts. Methods take it, unless a heading says otherwise. A writer fills
    the outbound ring and a reader empties the inbound ring into fresh tensors. Queues keep the messages in flight, and
    PathSwitch chooses their paths.
    """

    def __init__(
        self,
        ends: LinkEnds,
        settings: HostSettings,
        device: Device | None = None,
        arrival_signal: ArrivalSignal | None = None,
        opens_s: float = 0.0,
        second: SecondPath | None = None,
        threads: LinkThreads | None = None,
    ) -> None:
        """`device`: of the tensors; None: the CPU. `arrival_signal`: notified of every arrival. `opens_s`: see
        LinkHealth. `second`: parts of the device path; None: host path only. `threads`: of all links of the rank;
        None: of this link alone.
        """
        self.sessions = 0
        """Number of sessions of the host path so far."""
        self.ends = ends
        self.opening = 1
        """Number of this opening of the link; agreed on before it comes up."""
        self._settings = settings
        self._arrival_signal = arrival_signal if arrival_signal is not None else ArrivalSignal()
        self._has_device_path = second is not None
        if second is None:
            second = SecondPath(PathSettings(), _never, _never)
        threads = LinkThreads() if threads is None else threads
        self._lock = lock = threading.Lock()
        wire = WIRES.get(settings.transport)  # None: which it is to be has not been settled
        self._state = state = HostLinkState(
            ends, lock, settings.grace_s, one_network=wire is None or wire.one_network, opens_s=opens_s
        )
        pooled_nbytes = settings.pooled_nbytes
        self._copies = copies_for(device, link=str(ends), pooled_nbytes=pooled_nbytes, on_ready=self._payload_ready)
        self._retransmit_queue = RetransmitQueue(
            settings.window_messages, settings.window_nbytes, self._copies.stage, second.send_note
        )
        self._receive_queue = ReceiveQueue()
        due = self._receive_queue.due
        # To write means to wait for copies of a device: a thread that does cannot serve other links.
        writing = threads.writing if device is None else WritingThread(f"adaptra-host-send-{ends.peer}")
        self._writer = HostLinkWriter(writing, lock, state, self._retransmit_queue, due, settings.timeout_s)
        self._reader = HostLinkReader(threads.reading, lock, state, self._copies, self._writer, due, self, settings)
        parts = self._retransmit_queue, self._writer, self._deliver_by_device, settings.timeout_s
        self._paths = PathSwitch(threads.writing, lock, state, second, *parts)
        self._awaited: MessageKey | None = None
        self._flushing = False
        self._writer.task.start()
        self._reader.task.start()

    # What brings it up, and ends it, calls: from any thread.

    def takes(self, transport: str) -> None:
        """Set the wire that carries the host path."""
        with self._lock:
            self._state.travels(one_network=WIRES[transport].one_network)

    def begin(self) -> None:
        """Bring up the device path, if the link has one. Until then all messages take the host path."""
        if self._has_device_path:
            self._paths.task.start()

    def fail(self, cause: str) -> None:
        """Record that the link does not come up."""
        with self._lock:
            self._state.fail(cause)

    @property
    def unusable(self) -> bool:
        """Return whether the link can carry no more messages, since it is closed, aborted or failed."""
        return self._state.finished or self._state.failed

    # What the training thread calls.

    def wait_until_up(self, deadline_s: float) -> None:
        """Wait until the host path is up. Raises TransportError at `deadline_s`, or once the link has failed."""
        with self._lock:
            while self._state.session is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._state.failed:
                    raise self._state.not_up_error(self._settings.timeout_s)
                self._state.state_changed.wait(left_s)

    def send_greeting(self, greeting: torch.Tensor) -> None:
        """Send the greeting, the first message over the host path. Raises the errors of `post_send`."""
        outgoing, now_s = self._outgoing(GREETING, greeting), time.monotonic()
        with self._lock:
            self._check_usable(GREETING, now_s, receiving=False)
            self._retransmit_queue.post(GREETING, 0, outgoing, now_s)
            self._writer.write_on()

    def receive_greeting(self, greeting: torch.Tensor, deadline_s: float) -> None:
        """Receive the peer's greeting and wait until it has this end's. Raises TransportError if they differ."""
        with self._lock:
            self._ask_for(GREETING, time.monotonic())
        received, _times = self.wait(GREETING, deadline_s)
        if not torch.equal(received, greeting):
            raise TransportError(
                f"{self.ends.here}, link {self.ends.direction(receiving=True)}: the greeting of {greeting.nbytes} "
                "bytes was corrupted on the host path"
            )
        self.flush(deadline_s)

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        """Post a message; return when and by which path. Raises TransportError if it cannot be sent or the link has
        failed.
        """
        outgoing, now_s = self._outgoing(key, tensor), time.monotonic()
        with self._lock:
            self._check_usable(key, now_s, receiving=False)
            path = self._paths.sender.post(key, outgoing, now_s).path
            if path is Path.HOST:
                self._writer.write_on()
            # Taken with the lock, done without: NCCL may block in a send, and threads of this link need the lock
            # meanwhile.
            work = self._paths.take_prompt()
        self._paths.perform(work)
        return MessageTimes(key, self.ends.peer, now_s, now_s, tensor.nbytes, path)

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape and dtype of the messages to come, which the device path does not transmit."""
        with self._lock:
            self._paths.specification = specification

    def post_receive(self, key: MessageKey) -> None:
        """Post a receive. Raises TransportError if the link has failed and the message has not arrived."""
        now_s = time.monotonic()
        with self._lock:
            self._check_usable(key, now_s, receiving=True)
            self._paths.receiver.post(key, self._paths.specification)
            self._ask_for(key, now_s)
            work = self._paths.take_prompt()
        self._paths.perform(work)

    def prefer(self, path: Path) -> None:
        """Prefer `path` while it is healthy, from the next message that both ends agree on."""
        with self._lock:
            self._paths.prefer(path)

    def measure(self) -> None:
        """Probe the path that is not in use with messages of the usual size, unless a burst is in flight."""
        with self._lock:
            self._paths.measure(self._copies.device)
            work = self._paths.take_prompt()
        self._paths.perform(work)

    def take_probes(self) -> list[ProbeTimes]:
        """Return the probe bursts that have ended since the last call."""
        with self._lock:
            return self._paths.take_probes()

    def path_counters(self) -> PathCounters | None:
        """Return counters for reports and tests; None for a link with the host path only."""
        with self._lock:
            return self._paths.counters() if self._has_device_path else None

    def ready(self, key: MessageKey) -> bool:
        """Return whether the message has arrived."""
        return key in self._receive_queue

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        """Handle a long wait for `keys` that began at `since_s`; return when to call this again.

        Raises TransportError for a message that cannot come any more.
        """
        with self._lock:
            now_s = time.monotonic()
            again_s = math.inf
            for key in keys:
                until_s = self.given_up_from_s(key)
                if now_s >= until_s and key not in self._receive_queue:
                    raise self._error(key, self._receive_queue.posted_s(key), now_s, receiving=True)
                again_s = min(again_s, until_s, self.look_again_s(key, since_s, now_s))
            return again_s

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        """Return a posted message. Raises TransportError if it cannot come any more, or at `deadline_s`."""
        with self._lock:
            self._awaited = key
            arrived = self._reader.wait_for(lambda: key in self._receive_queue, deadline_s, key)
            self._awaited = None
            if not arrived:
                raise self._error(key, self._receive_queue.posted_s(key), time.monotonic(), receiving=True)
            arrival, posted_s = self._receive_queue.pop(key)
        # Without the lock: it may make the device's stream wait.
        tensor = arrival.receipt.take()
        path = Path.DEVICE if arrival.sequence is None else Path.HOST
        return tensor, MessageTimes(key, self.ends.peer, posted_s, arrival.arrived_s, tensor.nbytes, path)

    def flush(self, deadline_s: float) -> None:
        """Wait until the peer has acknowledged all messages. Raises TransportError at `deadline_s`."""
        with self._lock:
            self._flushing = True
            flushed = self._reader.wait_for(lambda: not len(self._retransmit_queue), deadline_s)
            self._flushing = False
            if not flushed:
                message = self._retransmit_queue.oldest()
                assert message is not None
                assert message.key is not None
                raise self._error(message.key, message.posted_s, time.monotonic(), receiving=False)

    def close(self) -> None:
        """Send the last acknowledgements and FIN, unless the link was aborted, and end the threads. May be called
        twice."""
        with self._lock:
            self._state.closing = True
            for task in (self._writer.task, self._reader.task, self._paths.task):
                task.wake()
            session = self._state.session
        if self._state.over and session is not None:
            session.outbound.close()  # a write under way is not waited for
        self._writer.task.join(2 * FIN_S)  # after FIN, the end of the device path is no failure
        if (session := self._state.session) is not None:
            session.outbound.close()
            session.inbound.close()
        self._reader.task.join(FIN_S)
        self._copies.close(FIN_S)
        self._paths.close()

    @property
    def unacknowledged(self) -> int:
        """Number of messages kept for a possible resend."""
        with self._lock:
            return len(self._retransmit_queue)

    @property
    def stale(self) -> int:
        """Number of messages of ended attempts that were dropped."""
        return self._receive_queue.stale

    @property
    def doubles(self) -> int:
        """Number of duplicates that were dropped."""
        return self._reader.doubles + self._receive_queue.doubles

    @property
    def uses_device(self) -> bool:
        """Return whether messages take, or are expected on, the device path."""
        with self._lock:
            return self._paths.uses_device

    # What the supervisor calls.

    @property
    def finished(self) -> bool:
        """Return whether the link must not be brought up again."""
        return self._state.finished

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        """Begin a session of the host path: resend all unacknowledged messages."""
        # Before the lock is taken: page-locking the rings may wait for the device.
        self._copies.use_rings(outbound, inbound)
        with self._lock:
            self.sessions += 1
            self._state.begin(Session(outbound, inbound, give_up))
            self._state.up()
            # The former session's rings are gone, with everything in them.
            self._retransmit_queue.rewind()
            self._writer.task.wake()
            self._reader.task.wake()
            self._paths.host_changed(up=True)
        if self.sessions > 1:
            logger.info("link %s, to %s: the host path is up again", self.ends, self.ends.there)

    def disconnected(self, cause: str) -> None:
        """End the session of the host path, or record that one did not begin."""
        with self._lock:
            self._state.down(cause, time.monotonic())
            self._state.session = None
            self._state.note_end(cause)
            self._state.state_changed.notify_all()
            self._paths.host_changed(up=False)

    # Called by the control connection (the "line").

    def on_connected(self) -> None:
        """Record that the control connection is up: the peer's host answers."""
        with self._lock:
            self._state.line_changed(None)
            self._retransmit_queue.on_reconnected()
            self._paths.task.wake()

    def on_disconnected(self, cause: str) -> None:
        """Record that the control connection is down: the peer's host does not answer."""
        with self._lock:
            self._state.line_changed(cause)
            self._state.notify_waiting()

    def on_peer_running(self, running: bool) -> None:
        """Record whether the peer's process runs or is stopped."""
        with self._lock:
            self._state.on_peer_running(running, time.monotonic())

    def on_rank_failed(self, rank: int, cause: str) -> None:
        """Record that a rank has failed: the link fails with its cause."""
        self._end(rank, cause)

    def ended(self, cause: str) -> None:
        """Abort the link: in-flight messages fail with AbortedError(cause). Thread-safe."""
        self._end(None, cause)
        # Transfers in progress may wait for a peer that no longer answers. `_end` alone would leave their threads
        # waiting.
        self._paths.abort_all()

    def _end(self, rank: int | None, cause: str) -> None:
        with self._lock:
            self._state.lose(rank, cause)
            self._state.notify_waiting()

    def on_note_received(self, number: int, packet: bytes) -> int:
        """Process a note of the control connection; return the number below which all have arrived."""
        with self._lock:
            try:
                return self._on_note(number, packet)
            except ValueError as cause:
                self._state.fail(f"{self.ends.there} sent an invalid message: {cause}")
                return 0

    def noted(self, below: int) -> None:
        """Release notes below this number, which the peer has."""
        with self._lock:
            self._retransmit_queue.noted(below)

    # Called by the reader, with the lock held.

    def take(self, event: Event, receipt: Receipt | None) -> None:
        """Handle an event of the inbound ring. Raises ValueError for an invalid one."""
        if receipt is not None:
            self._deliver(key_of(event), MessageArrival(event.sequence, receipt, event.arrived_s))
        elif event.kind == Event.Kind.ACK:
            self._paths.acknowledged(event.sequence)
            self._wake_if_flushed()
            self._writer.write_on()  # there may be room in the window now
        elif event.kind == Event.Kind.BYE:
            self._state.fin_received = True
            self._state.on_fin()
        elif event.kind == Event.Kind.REPEATED:
            self._receive_queue.arrive_again(event.sequence)
        else:
            # Notes and probes have no receive to wait for, so they are acknowledged at once.
            self._receive_queue.due.append(event.sequence)
            if not is_probe(event):
                self._on_note(*note_of(event))
            elif self._has_device_path:
                self._paths.probed(event.iteration, event.arrived_s)
            else:
                raise ValueError("a probe, but this link has one path only")

    def given_up_from_s(self, key: MessageKey | None) -> float:
        """Return the time at which waiting for `key` (None: for all sends) fails."""
        if key is not None:
            return self._broken_from_s(by_device=self._paths.receiver.expects(key))
        healthy = self._paths.sender.device_healthy
        return self._broken_from_s(by_device=healthy and not self._retransmit_queue.messages(Path.HOST))

    def look_again_s(self, key: MessageKey | None, since_s: float, now_s: float) -> float:
        """Return when to check again a wait that began at `since_s`."""
        return self._paths.look_again_s(key, since_s, now_s)

    # With the lock held.

    def _check_usable(self, key: MessageKey, now_s: float, *, receiving: bool) -> None:
        """Raise TransportError if no path can carry `key`, unless it is to be received and has already arrived."""
        by_device = self._paths.receiver.alive if receiving else self._paths.sender.device_healthy
        if now_s >= self._broken_from_s(by_device=by_device) and not (receiving and key in self._receive_queue):
            raise self._error(key, now_s, now_s, receiving=receiving)

    def _ask_for(self, key: MessageKey, now_s: float) -> None:
        """Post the receive of `key`."""
        if key not in self._receive_queue:
            self._reader.ask(key)
        self._receive_queue.post(key, now_s)
        if self._receive_queue.due:
            self._writer.acknowledge()

    def _deliver(self, key: MessageKey, arrival: MessageArrival) -> None:
        """Take in a message that arrived by either path."""
        if not self._receive_queue.arrive(key, arrival):
            return
        # For waits on several links; `notify_waiting` is for a wait on this link alone.
        self._arrival_signal.arrived(key)
        if key == self._awaited:
            self._state.notify_waiting()

    def _deliver_by_device(self, key: MessageKey, tensor: torch.Tensor, arrived_s: float) -> None:
        self._deliver(key, MessageArrival(None, self._copies.receive_on_device(tensor), arrived_s))

    def _on_note(self, number: int, packet: bytes) -> int:
        """Process a note; return the number below which all have arrived. Raises ValueError for an invalid one."""
        if not self._has_device_path:
            raise ValueError(f"note {number}, but this link has one path only")
        self._paths.on_notes(self._receive_queue.take_note(number, packet))
        self._wake_if_flushed()
        return self._receive_queue.noted_below

    def _wake_if_flushed(self) -> None:
        if self._flushing and not len(self._retransmit_queue):
            self._state.notify_waiting()

    def _broken_from_s(self, *, by_device: bool) -> float:
        """Return the time at which waits on the link fail. `by_device`: the device path could still carry the
        message."""
        return math.inf if by_device and not self._state.over else self._state.broken_from_s()

    def _error(self, key: MessageKey, since_s: float, now_s: float, *, receiving: bool) -> TransportError:
        """Return the error for a message that has been in flight since `since_s`."""
        doing = "waited for" if receiving else "could not send"
        explained = self._has_device_path and not self._state.over
        also = self._paths.device_in_words(receiving=receiving) if explained else ""
        spelled = key.spelled(self._paths.specification.micro_batches)
        return self._state.error(doing, spelled, since_s, now_s, receiving=receiving, also=also)

    # Without the lock.

    def _payload_ready(self) -> None:
        with self._lock:
            self._writer.task.wake()

    def _outgoing(self, key: MessageKey, tensor: torch.Tensor) -> Computed:
        """Return the message in the form that is sent. Raises TransportError if it cannot be sent over this link."""
        check_can_travel(key, tensor, self._copies.device, self._settings.max_message_nbytes)
        # An alias: Megatron's deallocate_output_tensor swaps the storage under the caller's tensor.
        return self._copies.computed(tensor.detach().contiguous())
