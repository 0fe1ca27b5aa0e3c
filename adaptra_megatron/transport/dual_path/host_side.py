# SPDX-License-Identifier: Apache-2.0
"""What a link sends by its host path.

Messages, also those that the device path did not bring; notes, confirmations of what that brought, and probes.
"""

from __future__ import annotations

from collections import deque

import torch

from adaptra_megatron.authentication.tagged_json import packed
from adaptra_megatron.transport.failover.control_channel import ControlChannel
from adaptra_megatron.transport.failover.control_messages import Note, Received
from adaptra_megatron.transport.failover.sender import Posted, SenderEffects
from adaptra_megatron.transport.gpu.copies import Copies
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.gpu.device_copies import HostPayload
from adaptra_megatron.transport.host_link.retransmit_queue import RetransmitQueue
from adaptra_megatron.transport.host_link.state import HostLinkState
from adaptra_megatron.transport.host_link.writer import HostLinkWriter
from adaptra_megatron.transport.messages import MessageKey, TransportError

_CONFIRMS = 1 << 63
"""An acknowledgement with this bit is of the device path: a session, and how many of its messages have arrived."""
_COUNT_BITS = 40


def confirmation(sequence: int) -> tuple[int, int] | None:
    """What an acknowledgement says of the device path: session, and messages received. None if it is of the host's."""
    if not sequence & _CONFIRMS:
        return None
    return (sequence & ~_CONFIRMS) >> _COUNT_BITS, sequence & ((1 << _COUNT_BITS) - 1)


class HostSide:
    """Callers hold the link's lock."""

    def __init__(
        self,
        state: HostLinkState,
        retransmit_queue: RetransmitQueue,
        copies: Copies,
        writer: HostLinkWriter,
        due: deque[int],
        mail: ControlChannel,
    ) -> None:
        """`due`: the sequence numbers that `writer` is to acknowledge."""
        self._state, self._retransmit_queue, self._copies, self._writer = state, retransmit_queue, copies, writer
        self._due, self._mail = due, mail

    def send(self, key: MessageKey, message: Computed, number: int, now_s: float) -> None:
        """Send a message. Raises TransportError when the device failed."""
        self._writer.enqueue(key, self._copies.stage(message), number, now_s)

    def acknowledged(self, sequence: int) -> None:
        """The peer has what was sent with this number, and needs it no more than once."""
        message = self._retransmit_queue.acknowledge(sequence)
        if message is not None and message.key is None and not message.probe:
            self._mail.acknowledged(message.number)

    def say(self, note: Note, now_s: float) -> None:
        """Send a note; `mail` knows of it until the peer does."""
        packet = packed(note)
        number = self._mail.post(packet, now_s)
        payload = HostPayload(torch.frombuffer(bytearray(packet), dtype=torch.uint8))
        self._writer.enqueue(None, payload, number, now_s)

    def confirm(self, session: int, received: int, now_s: float) -> None:
        """Say that the first `received` of what a session carried are here; by note while the host path is down."""
        if self._state.session is None:
            self.say(Received(session, received), now_s)
            return
        self._due.append(_CONFIRMS | session << _COUNT_BITS | received)
        self._writer.acknowledge()

    @property
    def can_probe(self) -> bool:
        """Return whether a probe would leave now, and find none before it."""
        return self._state.session is not None and not self._retransmit_queue.probing

    def send_probe(self, message: Computed, number: int, now_s: float) -> None:
        """Send what is only there to be measured."""
        try:
            self._writer.enqueue(None, self._copies.stage(message), number, now_s, probe=True)
        except TransportError as cause:
            self._state.health.fail(str(cause))

    def move(self, effects: SenderEffects[Computed], now_s: float) -> None:
        """Messages between the host path and the device path."""
        if not effects.withdrawals and not effects.resends:
            return
        waiting = {message.number: message for message in self._retransmit_queue.messages(elsewhere=True)}
        for number in effects.withdrawals:
            self._retransmit_queue.send_elsewhere(waiting[number])
        for message in effects.resends:
            if message.number in waiting:
                self._retransmit_queue.send_after_all(waiting[message.number])
            else:
                self._send_again(message, now_s)
        self._state.notify_waiting()

    def unacknowledged(self) -> list[Posted[Computed]]:
        """The messages that the host path carries, for the device path; none if the device does not give them back."""
        try:
            return [
                Posted(message.number, message.key, message.payload.computed())
                for message in self._retransmit_queue.messages()
                if message.key is not None
            ]
        except TransportError as cause:
            self._state.fail(str(cause))
            return []

    def _send_again(self, message: Posted[Computed], now_s: float) -> None:
        # Not the training thread, maybe: a device that fails raises where that waits.
        try:
            self.send(message.key, message.payload, message.number, now_s)
        except TransportError as cause:
            self._state.health.fail(str(cause))
