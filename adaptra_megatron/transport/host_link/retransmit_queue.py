# SPDX-License-Identifier: Apache-2.0
"""Messages to one neighbour, from posting until it has acknowledged them: all that may have to be sent again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from adaptra_megatron.transport.gpu.copies import Payload
from adaptra_megatron.transport.messages import MessageKey


@dataclass(eq=False, slots=True)
class Outgoing:
    """One message under way. Holding it holds its bytes."""

    sequence: int
    key: MessageKey | None
    """None for a note or a probe."""
    number: int
    """Position among all messages of the directed link, or among all its notes, or probes."""
    payload: Payload
    posted_s: float
    written: bool = False
    """Set while it is in the ring of the present session, wholly or in part."""
    elsewhere: bool = False
    """Set if it was also sent by another path: the receiver does not wait for this one any more."""
    probe: bool = False
    """Without a key: whether it is only there to be measured."""


class RetransmitQueue:
    """In the order of posting, notes and probes first. Not safe for threads: its link's lock guards it."""

    def __init__(self, window_messages: int, window_nbytes: int) -> None:
        """How much may be on its way unacknowledged; one message always may, however large, and so may any note."""
        self._window_messages, self._window_nbytes = window_messages, window_nbytes
        self._unacknowledged: OrderedDict[int, Outgoing] = OrderedDict()
        self._unwritten: OrderedDict[int, Outgoing] = OrderedDict()
        self._unwritten_notes: OrderedDict[int, Outgoing] = OrderedDict()
        self._next_sequence = 0
        self._elsewhere = 0
        self._notes = 0
        self._written_messages = 0
        self._written_nbytes = 0

    def __len__(self) -> int:
        """Messages that the receiver may wait for."""
        return len(self._unacknowledged) - self._notes - self._elsewhere

    def post(
        self, key: MessageKey | None, payload: Payload, number: int, now_s: float, *, probe: bool = False
    ) -> Outgoing:
        """Append a message, or a note or a probe (no key)."""
        message = Outgoing(self._next_sequence, key, number, payload, now_s, probe=probe)
        self._unacknowledged[message.sequence] = message
        self._notes += key is None
        self._line(message)[message.sequence] = message
        self._next_sequence += 1
        return message

    def messages(self, *, elsewhere: bool = False) -> list[Outgoing]:
        """Messages that the receiver may wait for, in the order of posting; or all, those sent elsewhere too."""
        everything = [each for each in self._unacknowledged.values() if each.key is not None]
        return [each for each in everything if elsewhere or not each.elsewhere]

    @property
    def probing(self) -> bool:
        """Return whether a probe is on its way, if only one that is no longer usable: the receiver has memory for
        one."""
        return any(message.probe for message in self._unacknowledged.values())

    def oldest(self) -> Outgoing | None:
        """The message that the receiver has waited for longest."""
        messages = (each for each in self._unacknowledged.values() if each.key is not None and not each.elsewhere)
        return next(messages, None)

    def next_to_write(self) -> Outgoing | None:
        """What to put into the ring next: a note, or the next message if the window has room for it."""
        if self._unwritten_notes:
            return next(iter(self._unwritten_notes.values()))
        full = self._written_messages >= self._window_messages or self._written_nbytes >= self._window_nbytes
        return None if full or not self._unwritten else next(iter(self._unwritten.values()))

    def mark_written(self, message: Outgoing) -> None:
        """Count a message as on its way; called before its first byte is."""
        message.written = True
        del self._line(message)[message.sequence]
        if message.key is not None:
            self._written_messages += 1
            self._written_nbytes += message.payload.nbytes

    def mark_unwritten(self, message: Outgoing) -> None:
        """It did not get through: send it again. Nothing happens if it was acknowledged meanwhile."""
        if message.written and message.sequence in self._unacknowledged:
            self._forget(message)
            line = self._line(message)
            line[message.sequence] = message
            line.move_to_end(message.sequence, last=False)

    def rewind(self) -> None:
        """A new session has begun: everything that is not acknowledged is to be sent again."""
        for message in reversed(self._unacknowledged.values()):
            self.mark_unwritten(message)

    def send_elsewhere(self, message: Outgoing) -> None:
        """Another path carries it now. It stays: a part of it may have arrived, and its sequence number is taken."""
        if not message.elsewhere:
            message.elsewhere = True
            self._elsewhere += 1

    def send_after_all(self, message: Outgoing) -> None:
        """The other path did not bring it."""
        if message.elsewhere:
            message.elsewhere = False
            self._elsewhere -= 1

    def acknowledge(self, sequence: int) -> Outgoing | None:
        """Remove a message. None if it was acknowledged before: acknowledgements may come twice."""
        message = self._unacknowledged.pop(sequence, None)
        if message is None:
            return None
        self._notes -= message.key is None
        self._elsewhere -= message.elsewhere
        if message.written:
            self._forget(message)
        else:
            del self._line(message)[sequence]
        return message

    def _line(self, message: Outgoing) -> OrderedDict[int, Outgoing]:
        return self._unwritten_notes if message.key is None else self._unwritten

    def _forget(self, message: Outgoing) -> None:
        message.written = False
        if message.key is not None:
            self._written_messages -= 1
            self._written_nbytes -= message.payload.nbytes
