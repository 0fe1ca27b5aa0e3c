# SPDX-License-Identifier: Apache-2.0
"""The device path of one link: the sessions of both directions, made and ended by their numbers.

Nothing here but `confirmed` is called with the link's lock held, and nothing here waits for the peer but threads of its
own.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.failover.path_receiver import DeviceReceive
from adaptra_megatron.transport.failover.path_sender import DeviceSend
from adaptra_megatron.transport.gpu.cuda_device import Computed, DeviceThread, OutOfMemory, out_of_memory
from adaptra_megatron.transport.link_paths import PROBE_NBYTES
from adaptra_megatron.transport.message_keys import TensorSpecification, TransportError
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

# One end of one device session: sends and receives by index, and a thread that sees arrivals the moment they happen.
# Sends and receives start strictly in the order of their indices, from whichever threads they come, for NCCL matches
# by order alone. A message's starts in the thread that asks for it, at once: what the training launches after it is
# then behind it on the device too. What carries nothing (probes), and messages whose shape is to come first, wait
# their turn instead: of these none stands on the device behind another.

logger = logger_of(__name__)

END_S = 2.0


class SendingSession:
    """The source's end. What was sent is held until the target has confirmed it."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._turn = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[Computed, bool]] = {}
        self._lock = threading.Lock()
        """Guards what is held: confirmations are not to wait for a send that begins."""
        self._held: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, index: int, message: Computed, *, header: bool) -> None:
        """Returns at once. `header`: the target does not know the shape. Raises RuntimeError if the session failed."""
        with self._turn:
            self._early[index] = message, header
            while (due := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._send(self._next - 1, *due)

    def probe(self, index: int, nbytes: int = PROBE_NBYTES) -> None:
        """As `send`, for a tensor that is not needed afterwards."""
        self.send(index, Computed(self._group.empty((nbytes,), torch.uint8), None), header=False)

    def confirmed(self, received: int) -> None:
        """The target has the first `received`."""
        with self._lock:
            for index in [index for index in self._held if index < received]:
                del self._held[index]

    def abort(self) -> None:
        """Break the session; the other end sees it break too."""
        self._group.abort()

    def end(self) -> None:
        """Give the session up."""
        self._group.abort()
        with self._lock:
            self._held.clear()

    def _send(self, index: int, message: Computed, header: bool) -> None:
        held, tensor = [], message.tensor
        if message.event is not None:
            self._group.begin_after(message.event)
        if header:
            shape = self._group.bring(encode_shape(tensor.shape, torch.device("cpu")))
            held.append((self._group.send(shape, 2 * index), shape))
        held.append((self._group.send(tensor, 2 * index + 1), tensor))
        with self._lock:
            self._held[index] = held


class _Receive(NamedTuple):
    """What was asked for."""

    place: int
    """Its index in the session."""
    shape: tuple[int, ...] | None
    """None: a header comes first."""
    dtype: torch.dtype
    probe: bool


class _UnderWay(NamedTuple):
    """What has been launched."""

    receive: _Receive
    work: Any
    buffer: torch.Tensor
    """For a header where the receive has no shape."""


class ReceivingSession:
    """The target's end."""

    def __init__(
        self,
        group: LinkGroup,
        timeout_s: float,
        arrived: Callable[[torch.Tensor, float], None],
        failed: Callable[[str], None],
    ) -> None:
        """`arrived(tensor, time)` is called for each message in turn, `failed(cause)` at most once, by the thread."""
        self._group, self._timeout_s = group, timeout_s
        self._arrived, self._failed = arrived, failed
        self._lock = threading.Lock()
        self._early: dict[int, _Receive] = {}
        self._asked = 0
        self._waiting: deque[_Receive] = deque()
        """Asked for, in order, and not launched."""
        self._standing = 0
        """Launched, and not waited for to the end."""
        self._awaits_body = False
        """A header has been launched, and nothing can be before what it announces."""
        self._under_way: queue.SimpleQueue[_UnderWay | Exception | None] = queue.SimpleQueue()
        """For the thread; an error says why a launch failed."""
        name = f"adaptra-device-receive-{group.ends.source}"
        self._thread = DeviceThread(self._run, name)
        self._thread.start()

    def receive(self, index: int, specification: TensorSpecification | None, probe_nbytes: int = PROBE_NBYTES) -> None:
        """Expect a message like this (without a shape, a header comes before it), or a probe (None). Never waits."""
        if specification is None:
            receive = _Receive(index, (probe_nbytes,), torch.uint8, probe=True)
        else:
            receive = _Receive(index, specification.shape, specification.dtype, probe=False)
        with self._lock:
            self._early[index] = receive
            while (due := self._early.pop(self._asked, None)) is not None:
                self._asked += 1
                self._waiting.append(due)
            self._launch_due()

    def abort(self) -> None:
        """Break the session; the other end sees it break too."""
        self._group.abort()

    def end(self) -> None:
        """Give the session up and end the thread. Not to be called by that thread."""
        self._under_way.put(None)
        self._group.abort()
        self._thread.join(END_S)

    def _launch_due(self) -> None:
        """Launch what is not to wait for its turn. The caller holds the lock."""
        while self._waiting and not self._awaits_body:
            first = self._waiting[0]
            # Of probes before a message all are sent at once, so none of them stands for long.
            behind = any(not each.probe and each.shape is not None for each in self._waiting)
            takes_turns = first.shape is None or (first.probe and not behind)
            if takes_turns and self._standing and not self._group.tagged:
                return
            self._waiting.popleft()
            self._awaits_body = first.shape is None and not self._group.tagged
            self._standing += 1
            self._under_way.put(self._launched(first))

    def _launched(self, receive: _Receive) -> _UnderWay | Exception:
        header = receive.shape is None
        try:
            if receive.shape is None:
                buffer = self._group.empty((HEADER_NUMBERS,), torch.int64)
            else:
                buffer = self._group.empty(receive.shape, receive.dtype)
            return _UnderWay(receive, self._group.receive(buffer, 2 * receive.place + (not header)), buffer)
        except OutOfMemory as cause:
            return out_of_memory("{}->{}".format(*self._group.ends), cause)
        except RuntimeError as cause:  # the thread comes to it after what is still under way
            return cause

    def _run(self) -> None:
        while (launched := self._under_way.get()) is not None:
            try:
                tensor = self._completed(launched)
            except Exception as cause:  # whatever the backend raises: the link has another path
                self._failed(
                    str(cause) if isinstance(cause, TransportError) else f"torch.distributed reported: {cause}"
                )
                return
            arrived_s = time.monotonic()
            with self._lock:
                self._standing -= 1
                self._launch_due()
            self._arrived(tensor, arrived_s)
            del launched, tensor

    def _completed(self, launched: _UnderWay | Exception) -> torch.Tensor:
        if isinstance(launched, Exception):
            raise launched
        receive, work, buffer = launched
        self._group.wait(work, self._timeout_s)
        if receive.shape is not None:
            return buffer
        shape = decode_shape(self._group.read(buffer))
        with self._lock:
            body = self._launched(receive._replace(shape=shape))
            self._awaits_body = False
        return self._completed(body)


MakeGroup = Callable[[bool, int, float], LinkGroup]
"""(whether this end sends, session, timeout_s): this end of a device session. Raises RuntimeError."""


@dataclass
class DeviceWork:
    """Requests of a link to its device path, once it holds no lock."""

    sends: list[tuple[DeviceSend[Computed], bool]] = field(default_factory=list)
    """With or without a header."""
    receives: list[DeviceReceive[TensorSpecification]] = field(default_factory=list)
    begin: list[tuple[bool, int]] = field(default_factory=list)
    """Flag of the sending side, and the session."""
    end: list[tuple[bool, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.begin or self.end)


class DeviceEvents(Protocol):
    """Calls to a link, from threads of the device path that hold no lock."""

    def device_made(self, as_sender: bool, session: int) -> None:
        """The session's group has been made at this end."""

    def device_arrived(self, session: int, tensor: torch.Tensor, arrived_s: float) -> None:
        """The next message of a session is here."""

    def device_failed(self, as_sender: bool, session: int, cause: str) -> None:
        """A session is no longer usable, or could not be made."""


_MOST_MAKERS = 8
"""Attempts to meet that may be under way: a job's store that is stopped keeps each of them."""


class DevicePath:
    """Sessions of a link, one direction independent of the other."""

    def __init__(self, make_group: MakeGroup, events: DeviceEvents, *, meeting_s: float, timeout_s: float) -> None:
        """`meeting_s`: how long the peer has to come to a new session. `timeout_s`: longest wait for a message."""
        self._make_group, self._events = make_group, events
        self._meeting_s, self._timeout_s = meeting_s, timeout_s
        self._lock = threading.Lock()
        self._sending: dict[int, SendingSession] = {}
        self._receiving: dict[int, ReceivingSession] = {}
        self._makers: list[threading.Thread] = []
        self._closed = False

    def begin(self, as_sender: bool, session: int) -> None:
        """Meet the peer for a new session, in a thread of its own: the peer may not come."""
        maker = DeviceThread(self._make, "adaptra-meet", (as_sender, session))
        with self._lock:
            self._makers = [thread for thread in self._makers if thread.is_alive()]
            if meets := len(self._makers) < _MOST_MAKERS:
                maker.start()
                self._makers.append(maker)
        if not meets:
            cause = f"{_MOST_MAKERS} earlier attempts to meet do not end: the job's store does not answer"
            self._events.device_failed(as_sender, session, cause)

    def send(self, send: DeviceSend[Computed], *, header: bool) -> None:
        """Send a message, with its shape if the peer does not know it, or a probe."""
        with self._lock:
            session = self._sending.get(send.session)
        if session is None:
            return
        try:
            if send.message is None:
                session.probe(send.index, send.probe_nbytes)
            else:
                session.send(send.index, send.message.payload, header=header)
        except RuntimeError as cause:
            self._events.device_failed(True, send.session, f"torch.distributed reported: {cause}")

    def receive(self, receive: DeviceReceive[TensorSpecification]) -> None:
        """Expect a message that looks like this, or a probe."""
        with self._lock:
            session = self._receiving.get(receive.session)
        if session is not None:
            session.receive(receive.index, receive.specification, receive.probe_nbytes)

    def confirmed(self, session: int, received: int) -> None:
        """The peer has the first `received` of what a session carried: drop them."""
        with self._lock:
            sending = self._sending.get(session)
        if sending is not None:
            sending.confirmed(received)

    def end(self, as_sender: bool, session: int) -> None:
        """Give a session up."""
        with self._lock:
            ended = self._sending.pop(session, None) if as_sender else self._receiving.pop(session, None)
        if ended is not None:
            ended.end()

    def close(self) -> None:
        """End all sessions. Waits for those that are being made."""
        until_s = time.monotonic() + self._meeting_s + 1.0
        for maker in self._makers:
            maker.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._closed = True
            sessions = self._all()
            self._sending.clear()
            self._receiving.clear()
        for session in sessions:
            session.end()

    def abort_all(self) -> None:
        """Break every session at this end, as a failing network would: what is under way on them comes to nothing."""
        with self._lock:
            sessions = self._all()
        for session in sessions:
            session.abort()

    def _all(self) -> list[SendingSession | ReceivingSession]:
        return [*self._sending.values(), *self._receiving.values()]

    def _make(self, as_sender: bool, session: int) -> None:
        try:
            group = self._make_group(as_sender, session, self._meeting_s)
        except RuntimeError as cause:
            self._events.device_failed(as_sender, session, f"the two ends did not meet: {cause}")
            return
        with self._lock:
            if self._closed:
                group.abort()
                return
            if as_sender:
                self._sending[session] = SendingSession(group)
            else:
                self._receiving[session] = ReceivingSession(
                    group,
                    self._timeout_s,
                    functools.partial(self._events.device_arrived, session),
                    functools.partial(self._events.device_failed, False, session),
                )
        self._events.device_made(as_sender, session)
