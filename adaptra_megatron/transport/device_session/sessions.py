# SPDX-License-Identifier: Apache-2.0
"""The device path of one link: the sessions of both directions, made and ended by their numbers.

Nothing here but `confirmed` is called with the link's lock held, and nothing here waits for the peer but threads of its
own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.device_session.session import ReceivingSession, SendingSession
from adaptra_megatron.transport.failover.receiver import DeviceReceive
from adaptra_megatron.transport.failover.sender import DeviceSend
from adaptra_megatron.transport.gpu.cuda_device import Computed, DeviceThread
from adaptra_megatron.transport.messages import TensorSpecification

MakeGroup = Callable[[bool, int, float], LinkGroup]
"""(whether this end sends, session, timeout_s): this end of a device session. Raises RuntimeError."""


@dataclass
class DeviceWork:
    """What a link has to ask of its device path, once it holds no lock."""

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
