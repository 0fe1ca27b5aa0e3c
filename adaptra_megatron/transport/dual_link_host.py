# SPDX-License-Identifier: Apache-2.0
"""What a link with two paths sends by its host path besides the messages that are posted to it.

Notes, confirmations of what the device path brought, probes, and messages that the device path did not bring.
"""

from __future__ import annotations

from collections import deque

import torch

from adaptra_megatron.transport.copies import Copies
from adaptra_megatron.transport.cuda_device import Computed
from adaptra_megatron.transport.device_copies import HostPayload
from adaptra_megatron.transport.host_link_state import HostLinkState
from adaptra_megatron.transport.host_link_writer import HostLinkWriter
from adaptra_megatron.transport.messages import TransportError
from adaptra_megatron.transport.note_mail import NoteMail
from adaptra_megatron.transport.notes import Note, Received
from adaptra_megatron.transport.outbox import Outbox
from adaptra_megatron.transport.outlet import OutletEffects, Posted
from adaptra_megatron.transport.tagged_json import packed

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
        outbox: Outbox,
        copies: Copies,
        writer: HostLinkWriter,
        due: deque[int],
        mail: NoteMail,
    ) -> None:
        """`due`: the sequence numbers that `writer` is to acknowledge."""
        self._state, self._outbox, self._copies, self._writer = state, outbox, copies, writer
        self._due, self._mail = due, mail

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

    def send_probe(self, message: Computed, number: int, now_s: float) -> None:
        """Send what is only there to be measured."""
        try:
            self._writer.enqueue(None, self._copies.stage(message), number, now_s, probe=True)
        except TransportError as cause:
            self._state.health.fail(str(cause))

    def move(self, effects: OutletEffects[Computed], now_s: float) -> None:
        """Messages between the host path and the device path."""
        if not effects.withdrawals and not effects.resends:
            return
        waiting = {message.number: message for message in self._outbox.messages(elsewhere=True)}
        for number in effects.withdrawals:
            self._outbox.send_elsewhere(waiting[number])
        for message in effects.resends:
            if message.number in waiting:
                self._outbox.send_after_all(waiting[message.number])
            else:
                self._send_again(message, now_s)
        self._state.tell_waiting()

    def unacknowledged(self) -> list[Posted[Computed]]:
        """The messages that the host path carries, for the device path; none if the device does not give them back."""
        try:
            return [
                Posted(message.number, message.key, message.payload.computed())
                for message in self._outbox.messages()
                if message.key is not None
            ]
        except TransportError as cause:
            self._state.health.fail(str(cause))
            self._state.tell_waiting()
            return []

    def _send_again(self, message: Posted[Computed], now_s: float) -> None:
        # Not the training thread, maybe: it hears of a device that fails where it waits.
        try:
            payload = self._copies.stage(message.payload)
        except TransportError as cause:
            self._state.health.fail(str(cause))
            return
        self._writer.enqueue(message.key, payload, message.number, now_s)
