# SPDX-License-Identifier: Apache-2.0
"""Choose the path of each message of a link, device or host, and move messages to the other path when one fails.

1. The sender of a direction decides and its receiver follows; the two directions are independent.
2. Sender and Receiver do the bookkeeping: they are given events (a note, a probe, a failure, the time), and record
   effects for the caller to perform.
3. Effects on the host path are performed at once, with the lock held: they only fill queues.
4. Effects on the device path (posting, creating and ending sessions) may wait for NCCL. The link has a thread for them
   while there are some. It performs them without the lock, in the order in which they were recorded. The training
   thread performs the effects of its own calls itself. Only a thread of its own waits for the peer of a new session.
5. Notes between the ends use the host path, and the control connection while the host path is down. They never use the
   device path, where a pending receive would occupy a multiprocessor.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.device_session.sessions import ReceivingSession, SendingSession
from adaptra_megatron.transport.failover.control_messages import (
    FromSender,
    HostProbed,
    Note,
    Open,
    Received,
    decode_note,
)
from adaptra_megatron.transport.failover.path_receiver import DeviceReceive, Receiver, ReceiverEffects
from adaptra_megatron.transport.failover.path_sender import Burst, DeviceSend, Sender, SenderEffects
from adaptra_megatron.transport.gpu.cuda_device import Computed, DeviceThread
from adaptra_megatron.transport.host_link.host_link_state import HostLinkState
from adaptra_megatron.transport.host_link.host_link_writer import HostLinkWriter
from adaptra_megatron.transport.host_link.link_thread import LinkTask, WritingThread
from adaptra_megatron.transport.host_link.message_queues import RetransmitQueue
from adaptra_megatron.transport.link_paths import Path, PathCounters, PathSettings, ProbeTimes, why_down
from adaptra_megatron.transport.message_keys import MessageKey, TensorSpecification, TransportError

logger = logger_of(__name__)


_CONFIRMS = 1 << 63
"""Bit that marks an acknowledgement of the device path: session, and number of its messages that have arrived."""
_COUNT_BITS = 40


def confirmation(sequence: int) -> tuple[int, int] | None:
    """Return (session, messages received) of a device-path acknowledgement; None for one of the host path."""
    if not sequence & _CONFIRMS:
        return None
    return (sequence & ~_CONFIRMS) >> _COUNT_BITS, sequence & ((1 << _COUNT_BITS) - 1)


_TICK_S = 0.05
_IDLE_S = 60.0
_MOST_MAKERS = 8
"""Maximum number of threads that create sessions at once: each waits for the job's store while that does not answer."""

MakeGroup = Callable[[bool, int, float], LinkGroup]
"""(sends, session, timeout_s) -> this end of a device session. Raises RuntimeError."""


@dataclass(frozen=True)
class SecondPath:
    """Settings and parts of a link's device path."""

    settings: PathSettings
    make_group: MakeGroup
    send_note: Callable[[int, bytes], None]
    """See RetransmitQueue."""


@dataclass
class DeviceWork:
    """Actions for the device path, to be performed without the link's lock."""

    sends: list[tuple[DeviceSend, bool]] = field(default_factory=list)
    """Messages to send, each with whether a header precedes it."""
    receives: list[DeviceReceive[TensorSpecification]] = field(default_factory=list)
    begin: list[tuple[bool, int]] = field(default_factory=list)
    """(this end sends, session) of sessions to make."""
    end: list[tuple[bool, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.begin or self.end)


class PathSwitch:
    """Path selection of a link, and its actions on both paths, with the sessions of the device path. Callers hold the
    link's lock, unless a heading says otherwise. Until `task` runs, all messages take the host path.
    """

    def __init__(
        self,
        thread: WritingThread,
        lock: threading.Lock,
        state: HostLinkState,
        second: SecondPath,
        retransmit_queue: RetransmitQueue,
        writer: HostLinkWriter,
        deliver: Callable[[MessageKey, torch.Tensor, float], None],
        timeout_s: float,
    ) -> None:
        """`deliver(key, tensor, time)`: called for each message of the device path, longest awaited for `timeout_s`."""
        self.settings = second.settings
        self.sender = Sender(second.settings, retransmit_queue)
        self.receiver: Receiver[TensorSpecification] = Receiver(second.settings)
        self.task = LinkTask(thread, lock, self._next_step)
        """Timed actions and overdue notes; ends once the link closes."""
        self._lock = lock
        self._actors: list[DeviceThread] = []
        """Threads that perform slow actions on the device path, one at a time; the others have only to return."""
        self._acting = False
        self._makers: list[DeviceThread] = []
        """Threads that create sessions with the peer, which may not come."""
        self._sending: dict[int, SendingSession] = {}
        self._receiving: dict[int, ReceivingSession] = {}
        """Sessions of each direction, by number. Changed with the lock held; any thread may look one up."""
        self._closed = False
        self._state, self._retransmit_queue, self._writer = state, retransmit_queue, writer
        self._make_group, self._deliver, self._timeout_s = second.make_group, deliver, timeout_s
        self._work, self._nothing = DeviceWork(), DeviceWork()
        """Actions on the device path that are due."""
        self._end_logged = {True: False, False: False}
        self._host_burst: Burst | None = None
        """Burst that probes the host path; None if none is in flight."""
        self._host_probes = 0
        """Number of probes sent by the host path so far."""
        self.specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        """Shape and dtype of the messages to come."""
        self._measured: list[ProbeTimes] = []

    # What the training thread asks for. After these, it takes the work that is due, and does it without the lock.

    def measure(self, device: torch.device) -> None:
        """Probe the unused path with tensors of the usual size on `device`, unless a burst is in flight."""
        # Nothing was sent yet: a probe of another size would not tell the time of the usual messages.
        if not self.sender.latest_nbytes:
            return
        if self.sender.path is Path.HOST:
            self.sender.measure(self.sender.latest_nbytes)
        elif self._state.session and not self._retransmit_queue.probing and self._host_burst is None:
            message = Computed(torch.empty(self.sender.latest_nbytes, dtype=torch.uint8, device=device), None)
            self._host_burst = Burst(Path.HOST, message.tensor.nbytes, self.settings.measuring_probes, message)
            self._send_probe(self._host_burst, time.monotonic())

    def take_prompt(self) -> DeviceWork:
        """Return the actions that the calling thread must `perform` at once; another thread does the others."""
        self._settle_effects()
        work = self._work
        if not work:
            return self._nothing
        # Sends and receives at once, so that the training's later work is behind them on the device. To create or end a
        # session may wait.
        self._work = DeviceWork(begin=work.begin, end=work.end)
        if self._work:
            self.task.wake()
        return DeviceWork(sends=work.sends, receives=work.receives)

    def prefer(self, path: Path) -> None:
        """Prefer `path` while it is healthy, from the next message that both ends agree on."""
        self.sender.prefer(path)
        self.task.wake()

    def take_probes(self) -> list[ProbeTimes]:
        """Return the probe bursts that have ended since the last call."""
        measured, self._measured = self._measured, []
        return measured

    def counters(self) -> PathCounters:
        """Return counters for reports and tests."""
        down_since_s = self._state.down_since_s
        down = down_since_s is not None and time.monotonic() - down_since_s > self.settings.host_patience_s
        return PathCounters(
            path=self.sender.path,
            sent_by_device=self.sender.by_path[Path.DEVICE],
            sent_by_host=self.sender.by_path[Path.HOST],
            switches=self.sender.switches,
            sessions_lost=self.sender.failures + self.receiver.deaths,
            device_down=self.sender.given_up,
            host_down=self._state.cause if down else None,
        )

    @property
    def uses_device(self) -> bool:
        """Return whether messages take, or are expected on, the device path."""
        return self.sender.path is Path.DEVICE or self.sender.retained > 0 or self.receiver.in_use

    def device_in_words(self, *, receiving: bool) -> str:
        """Return the state of the device path, as a part of an error message."""
        half = self.receiver if receiving else self.sender
        carries = self.receiver.carries if receiving else self.sender.path is Path.DEVICE
        alive = self.receiver.proven if receiving else self.sender.device_healthy
        if not alive:
            return f"the device path is down: {why_down(half.died, half.cause)}"
        return "the device path is up" + ("" if carries else ", but the two ranks could not agree to change to it")

    def look_again_s(self, key: MessageKey | None, since_s: float, now_s: float) -> float:
        """Return the time of the next call, for a wait since `since_s` for `key` (None: for all sends)."""
        look_again_s = now_s + self.settings.suspicion_s
        if key is not None and self.receiver.expects(key):
            look_again_s = min(look_again_s, self.receiver.suspect(since_s, now_s))
            self._settle()
        return look_again_s

    # What the host path and the line bring.

    def host_changed(self, *, up: bool) -> None:
        """Record that the host path is up or down, and repeat the latest acknowledgements, which may not have
        arrived.
        """
        self.receiver.confirm_again()
        if up:
            self._host_burst = None  # what was under way tells how long the link was down
        self._settle_effects()
        self.task.wake()

    def acknowledged(self, sequence: int) -> None:
        """Handle an acknowledgement: of a host-path message, or of a device session's messages."""
        if (confirmed := confirmation(sequence)) is None:
            self._retransmit_queue.acknowledge(sequence)
        else:
            self._confirmed(*confirmed)

    def probed(self, number: int, arrived_s: float) -> None:
        """Answer a probe that arrived by the host path."""
        self._send_note(HostProbed(number, arrived_s), time.monotonic())

    def on_notes(self, packets: Iterable[bytes]) -> None:
        """Process notes, in order. Raises ValueError for an invalid one."""
        now_s = time.monotonic()
        for packet in packets:
            note = decode_note(packet)
            try:
                self._on_note(note, now_s)
            # Valid fields in an impossible order: the peer is broken, or runs another version.
            except (AssertionError, LookupError) as cause:
                raise ValueError(f"{note}, which does not fit what was said before") from cause
        self._settle_effects()
        self.task.wake()

    def _on_note(self, note: Note, now_s: float) -> None:
        if isinstance(note, FromSender):
            self.receiver.on_note(note, now_s)
        elif isinstance(note, HostProbed):
            burst = self._host_burst
            if burst is None or not burst.answered(note.number, note.arrived_s):
                return
            if not burst.over:
                self._send_probe(burst, now_s)
                return
            self._host_burst = None
            self._measured += burst.times(self._state.ends.peer)
        elif isinstance(note, Received):
            self._confirmed(note.session, note.count)
        else:
            self.sender.on_note(note, now_s)

    def _confirmed(self, session: int, received: int) -> None:
        self.sender.confirmed(session, received)
        if (sending := self._sending.get(session)) is not None:
            sending.confirmed(received)
        if not self.sender.device_healthy:
            self.task.wake()  # these may have been the probes

    # Effects: those on the host path at once, those on the device path once a thread does them without the lock.

    def _settle(self) -> None:
        """Perform the pending effects of sender and receiver."""
        self._settle_effects()
        if self._work:
            self.task.wake()

    def _settle_effects(self) -> None:
        if not self.sender.effects and not self.receiver.effects:
            return
        now_s = time.monotonic()
        # Swapped out first: effects that arise meanwhile are kept for the next call.
        sender, self.sender.effects = self.sender.effects, SenderEffects()
        receiver, self.receiver.effects = self.receiver.effects, ReceiverEffects()
        for note in (*sender.notes, *receiver.notes):
            self._send_note(note, now_s)
            if isinstance(note, Open):
                level = logging.INFO if self.sender.failures else logging.DEBUG  # after a failure it is news
                link = self._state.ends.direction(receiving=False)
                logger.log(level, "link %s: messages go by the device path", link)
                self._state.notify_waiting()
        if receiver.confirm is not None:
            self._confirm(*receiver.confirm, now_s)
        if sender.measured is not None:
            self._measured += sender.measured.times(self._state.ends.peer)
        if sender.resends:
            try:
                for message in sender.resends:
                    self._retransmit_queue.carry(message, Path.HOST)
            except TransportError as cause:  # perhaps not in the training thread: the failed link raises it there
                self._state.fail(str(cause))
            self._writer.write_on()
            self._state.notify_waiting()
        work, header = self._work, self.specification.shape is None
        work.sends += [(send, header) for send in sender.sends]
        work.receives += receiver.receives
        work.begin += [(True, session) for session in sender.begin] + [(False, session) for session in receiver.begin]
        work.end += [(True, session) for session in sender.end] + [(False, session) for session in receiver.end]

    def _send_note(self, note: Note, now_s: float) -> None:
        self._retransmit_queue.post_note(packed(note), now_s)
        self._writer.write_on()

    def _confirm(self, session: int, received: int, now_s: float) -> None:
        """Acknowledge the first `received` messages of a device session; by note while the host path is down."""
        # Acknowledgements are entries of the ring, which is gone with the session; a note may use the control
        # connection.
        if self._state.session is None:
            self._send_note(Received(session, received), now_s)
        else:
            self._writer.acknowledge(_CONFIRMS | session << _COUNT_BITS | received)

    def _send_probe(self, burst: Burst, now_s: float) -> None:
        """Send the next probe of a burst by the host path."""
        assert burst.message is not None
        burst.sent(self._host_probes, now_s)
        try:
            self._retransmit_queue.post_probe(self._host_probes, burst.message, now_s)
            self._writer.write_on()
        except TransportError as cause:
            self._state.fail(str(cause))
        self._host_probes += 1

    # Timed actions.

    def _next_step(self) -> float | None:
        state = self._state
        if state.closing:
            return None
        now_s = time.monotonic()
        down_since_s = state.down_since_s
        if not state.finished:
            # 0 means up, so a path that has gone down in this moment needs a positive time.
            down_s = 0.0 if down_since_s is None else max(now_s - down_since_s, 1e-9)
            self.sender.tick(now_s, down_s)
        self._settle_effects()
        self._retransmit_queue.send_overdue(now_s)
        if self._work and not self._acting:
            self._acting = True
            actor = DeviceThread(self._act, f"adaptra-path-{state.ends.peer}")
            actor.start()
            self._actors = [*(each for each in self._actors if each.is_alive()), actor]
        until_s = self._retransmit_queue.overdue_from_s
        if not state.finished:
            until_s = min(until_s, self.sender.next_tick_s, math.inf if down_since_s is None else now_s + _TICK_S)
        return min(_IDLE_S, max(1e-3, until_s - now_s))

    def _log_end(self, as_sender: bool) -> None:
        half = self.sender if as_sender else self.receiver
        level = logging.WARNING if half.was_healthy else logging.INFO
        if self._state.finished or (self._end_logged[as_sender] and not half.was_healthy):
            level = logging.DEBUG  # tried again and again, as between two stages on one GPU
        self._end_logged[as_sender] = True
        link = self._state.ends.direction(receiving=not as_sender)
        logger.log(level, "link %s: the device path is down (%s); messages go by the host path", link, half.cause)

    # The device path, without the lock.

    def perform(self, work: DeviceWork) -> None:
        """Post sends and receives of messages and probes, then create and end sessions."""
        for send, header in work.sends:
            if (sending := self._sending.get(send.session)) is None:
                continue
            try:
                if send.message is None:
                    sending.probe(send.index, send.probe_nbytes)
                else:
                    sending.send(send.index, send.message.computed, header=header)
            except RuntimeError as cause:
                self._failed(True, send.session, f"torch.distributed reported: {cause}")
        for receive in work.receives:
            if (receiving := self._receiving.get(receive.session)) is not None:
                receiving.receive(receive.index, receive.specification, receive.probe_nbytes)
        for as_sender, session in work.begin:
            self._begin(as_sender, session)
        for as_sender, session in work.end:
            with self._lock:
                ended = self._sending.pop(session, None) if as_sender else self._receiving.pop(session, None)
            if ended is not None:
                ended.end()

    def abort_all(self) -> None:
        """Abort every session at this end, as a failing network would."""
        with self._lock:
            sessions = self._sessions()
        for session in sessions:
            session.abort()

    def close(self) -> None:
        """End all sessions once nothing more is done on the device path. The link closes already."""
        limit_s = self.settings.probe_limit_s + 1.0
        until_s = time.monotonic() + limit_s
        self.task.join(limit_s)
        for thread in (*self._actors, *self._makers):
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._closed = True
            sessions = self._sessions()
            self._sending.clear()
            self._receiving.clear()
        for session in sessions:
            session.end()

    def _sessions(self) -> list[SendingSession | ReceivingSession]:
        return [*self._sending.values(), *self._receiving.values()]

    def _act(self) -> None:
        while True:
            with self._lock:
                if self._state.closing or not self._work:
                    self._acting = False
                    return
                work, self._work = self._work, DeviceWork()
                for as_sender, _session in work.end:
                    self._log_end(as_sender)
            self.perform(work)

    def _begin(self, as_sender: bool, session: int) -> None:
        self._makers = [thread for thread in self._makers if thread.is_alive()]
        # A thread that waits for the store cannot be interrupted, and back-off keeps starting new ones.
        if len(self._makers) == _MOST_MAKERS:
            cause = f"{_MOST_MAKERS} earlier attempts to meet do not end: the job's store does not answer"
            self._failed(as_sender, session, cause)
            return
        maker = DeviceThread(self._make, "adaptra-meet", (as_sender, session))
        maker.start()
        self._makers.append(maker)

    def _make(self, as_sender: bool, session: int) -> None:
        try:
            group = self._make_group(as_sender, session, self.settings.probe_limit_s)
        except RuntimeError as cause:
            self._failed(as_sender, session, f"the two ends did not meet: {cause}")
            return
        made = SendingSession(group) if as_sender else self._receiving_end(group, session)
        with self._lock:
            # `close` has not waited for this thread any longer: nothing else would end the session.
            if not (closed := self._closed):
                if isinstance(made, SendingSession):
                    self._sending[session] = made
                    self.sender.made(session, time.monotonic())
                else:
                    self._receiving[session] = made
                    self.receiver.made(session)
                self._settle_effects()
                self.task.wake()
        if closed:
            made.end()

    def _receiving_end(self, group: LinkGroup, session: int) -> ReceivingSession:
        arrived = functools.partial(self._arrived, session)
        return ReceivingSession(group, self._timeout_s, arrived, functools.partial(self._failed, False, session))

    def _arrived(self, session: int, tensor: torch.Tensor, arrived_s: float) -> None:
        """Deliver a session's next message, if anything waits for it."""
        with self._lock:
            number = self.receiver.arrived(session, tensor.nbytes, arrived_s)
            if number is not None and number >= 0:
                self._deliver(self.receiver.key(number), tensor, arrived_s)
            self._settle()

    def _failed(self, as_sender: bool, session: int, cause: str) -> None:
        """Record that a session failed, or could not be made."""
        with self._lock:
            (self.sender if as_sender else self.receiver).failed(session, cause)
            self._settle_effects()
            self.task.wake()
