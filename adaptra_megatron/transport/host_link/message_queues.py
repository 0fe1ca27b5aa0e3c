# SPDX-License-Identifier: Apache-2.0
"""Messages to one neighbour, from posting until it has acknowledged them: all that may have to be sent again."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from adaptra_megatron.transport.gpu.copies import Payload, Receipt
from adaptra_megatron.transport.message_keys import MessageKey

# Messages from one neighbour, between their arrival or the asking for them and their use; and what to acknowledge.


@dataclass(frozen=True, slots=True)
class MessageArrival:
    """A message that is here."""

    sequence: int | None
    """None where it came by another path than the host path."""
    receipt: Receipt
    arrived_s: float


class ReceiveQueue:
    """Not safe for threads: its link's lock guards it."""

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        """Sequence numbers that the sender is still to be told of: arrived and asked for."""
        self.doubles = 0
        """Messages that were here already, by another path, and were dropped."""
        self.stale = 0
        """Messages of attempts that had ended, which were dropped."""
        self._posted: dict[MessageKey, float] = {}
        self._arrived: dict[MessageKey, MessageArrival] = {}
        self._used: set[MessageKey] = set()
        """Keys of the latest attempt: earlier ones are over, and theirs not listed."""
        self._turn = (0, 0)
        """The latest attempt, of which receives have been posted."""

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: MessageKey) -> bool:
        """Return whether the message has arrived. Any thread may ask."""
        return key in self._arrived

    def post(self, key: MessageKey, now_s: float) -> None:
        """A receive of `key` is posted. Attempts only go up: what is left of earlier ones is dropped."""
        assert key not in self._posted, f"{key} was posted twice"
        assert key.turn >= self._turn, f"{key} is posted in attempt {self._turn}"
        if key.turn > self._turn:
            self._begin(key.turn)
        self._posted[key] = now_s
        if key in self._arrived:
            self._owe(self._arrived[key])
            self._arrived[key].receipt.begin()

    def posted_s(self, key: MessageKey) -> float:
        """Return when `key` was asked for."""
        return self._posted[key]

    def arrive(self, key: MessageKey, arrival: MessageArrival) -> bool:
        """Keep a message and return True; one that is or was here already is dropped, and acknowledged all the same."""
        over = key.turn < self._turn
        if over or key in self._used or key in self._arrived:
            stale = over and key.iteration == self._turn[0]  # all of an iteration that is over have been used
            self.stale += stale
            self.doubles += not stale
            self._owe(arrival)
            return False
        self._arrived[key] = arrival
        if key in self._posted:
            self._owe(arrival)
            arrival.receipt.begin()
        return True

    def arrive_again(self, sequence: int) -> None:
        """A retransmission: acknowledge again, unless its receive has not been posted yet."""
        unasked = {arrival.sequence for key, arrival in self._arrived.items() if key not in self._posted}
        if sequence not in unasked:
            self.due.append(sequence)

    def pop(self, key: MessageKey) -> tuple[MessageArrival, float]:
        """A message that has arrived and was asked for, and when it was asked for."""
        self._used.add(key)
        return self._arrived.pop(key), self._posted.pop(key)

    def _begin(self, turn: tuple[int, int]) -> None:
        """Another attempt begins: the sender need not keep what nothing will ask for."""
        self._turn = turn
        self._used.clear()
        for key in [key for key in self._arrived if key.turn < turn]:
            arrival = self._arrived.pop(key)
            self.stale += 1
            if key not in self._posted:
                self._owe(arrival)
        for key in [key for key in self._posted if key.turn < turn]:
            del self._posted[key]

    def _owe(self, arrival: MessageArrival) -> None:
        if arrival.sequence is not None:
            self.due.append(arrival.sequence)


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
        """Return what to put into the ring next: a note, or the next message if the window has room for it."""
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
