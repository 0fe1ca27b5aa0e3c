# SPDX-License-Identifier: Apache-2.0
"""What a link does on its device path: collected with the link's lock, done without it.

Sending and receiving are for the thread that asks for them; making and ending sessions may take time, and is for a
thread of its own.
"""

from __future__ import annotations

import logging

from adaptra_megatron.log import logger_of
from adaptra_megatron.transport.device_session.sessions import DevicePath, DeviceWork
from adaptra_megatron.transport.failover.receiver import Receiver, ReceiverEffects
from adaptra_megatron.transport.failover.sender import Sender, SenderEffects
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.host_link.state import HostLinkState
from adaptra_megatron.transport.messages import TensorSpecification

logger = logger_of(__name__)


class DeviceSide:
    """Callers hold the link's lock, unless it says otherwise."""

    def __init__(
        self, state: HostLinkState, sender: Sender[Computed], receiver: Receiver[TensorSpecification], path: DevicePath
    ) -> None:
        self._state, self._sender, self._receiver, self._path = state, sender, receiver, path
        self._work = DeviceWork()
        self._nothing = DeviceWork()
        self._told_ended = {True: False, False: False}

    @property
    def pending(self) -> bool:
        """Return whether there is work to take."""
        return bool(self._work)

    def add(
        self, sender: SenderEffects[Computed], receiver: ReceiverEffects[TensorSpecification], *, header: bool
    ) -> None:
        """What the two ask of the device path. `header`: whether messages must say what they look like."""
        work = self._work
        work.sends += [(send, header) for send in sender.sends]
        work.receives += receiver.receives
        work.begin += [(True, session) for session in sender.begin] + [(False, session) for session in receiver.begin]
        work.end += [(True, session) for session in sender.end] + [(False, session) for session in receiver.end]

    def take_prompt(self) -> DeviceWork:
        """What takes no time; the rest stays pending."""
        work = self._work
        if not work:
            return self._nothing
        self._work = DeviceWork(begin=work.begin, end=work.end)
        return DeviceWork(sends=work.sends, receives=work.receives)

    def take_all(self) -> DeviceWork:
        """All that is pending."""
        work, self._work = self._work, DeviceWork()
        for as_sender, _session in work.end:
            self._log_end(as_sender)
        return work

    def do(self, work: DeviceWork) -> None:
        """Without the lock."""
        for send, header in work.sends:
            self._path.send(send, header=header)
        for receive in work.receives:
            self._path.receive(receive)
        for as_sender, session in work.begin:
            self._path.begin(as_sender, session)
        for as_sender, session in work.end:
            self._path.end(as_sender, session)

    def _log_end(self, as_sender: bool) -> None:
        half = self._sender if as_sender else self._receiver
        level = logging.WARNING if half.was_healthy else logging.INFO
        if self._state.finished or (self._told_ended[as_sender] and not half.was_healthy):
            level = logging.DEBUG  # tried again and again, as between two stages on one GPU
        self._told_ended[as_sender] = True
        link = self._state.ends.direction(receiving=not as_sender)
        logger.log(level, "link %s: the device path is down (%s); messages go by the host path", link, half.cause)
