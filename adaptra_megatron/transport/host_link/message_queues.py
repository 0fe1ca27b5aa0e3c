# SPDX-License-Identifier: Apache-2.0
"""Queue the messages to one neighbour until it has acknowledged them, and messages from it until they are used."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from adaptra_megatron.transport.gpu.copies import Payload, Receipt
from adaptra_megatron.transport.message_keys import MessageKey


@dataclass(frozen=True, slots=True)
class MessageArrival:
    """A message that has arrived."""

    sequence: int | None
    """Sequence number of the host path; None if another path brought it."""
    receipt: Receipt
    arrived_s: float


class ReceiveQueue:
    """Messages of a peer between arrival and use. Not thread-safe: callers hold the link's lock."""

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        """Sequence numbers to acknowledge: messages that have arrived and whose receive is posted."""
        self.doubles = 0
        """Number of duplicates that were dropped."""
        self.stale = 0
        """Number of messages of ended attempts that were dropped."""
        self._posted: dict[MessageKey, float] = {}
        self._arrived: dict[MessageKey, MessageArrival] = {}
        self._used: set[MessageKey] = set()
        """Keys of the latest attempt that have been used; earlier attempts are over."""
        self._turn = (0, 0)
        """(iteration, attempt) of the latest receives."""

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: MessageKey) -> bool:
        """Return whether the message has arrived. For any thread."""
        return key in self._arrived

    def post(self, key: MessageKey, now_s: float) -> None:
        """Post the receive of `key`. A receive of a later attempt drops the remains of earlier ones."""
        assert key not in self._posted, f"{key} was posted twice"
        assert key.turn >= self._turn, f"{key} is posted in attempt {self._turn}"
        if key.turn > self._turn:
            self._begin(key.turn)
        self._posted[key] = now_s
        # It arrived before its receive was posted: acknowledge it now (rule 2 of dual_link.py).
        if key in self._arrived:
            self._owe(self._arrived[key])
            self._arrived[key].receipt.begin()

    def posted_s(self, key: MessageKey) -> float:
        """Return the time at which the receive of `key` was posted."""
        return self._posted[key]

    def arrive(self, key: MessageKey, arrival: MessageArrival) -> bool:
        """Keep a message and return True; acknowledge and drop a duplicate or a stale one, and return False."""
        over = key.turn < self._turn
        if over or key in self._used or key in self._arrived:
            stale = over and key.iteration == self._turn[0]  # all of an iteration that is over have been used
            self.stale += stale
            self.doubles += not stale
            # A duplicate is acknowledged, too: the first acknowledgement may have been lost with its session.
            self._owe(arrival)
            return False
        self._arrived[key] = arrival
        if key in self._posted:
            self._owe(arrival)
            arrival.receipt.begin()
        return True

    def arrive_again(self, sequence: int) -> None:
        """Acknowledge a retransmission again, unless its receive is not posted yet."""
        unasked = {arrival.sequence for key, arrival in self._arrived.items() if key not in self._posted}
        if sequence not in unasked:
            self.due.append(sequence)

    def pop(self, key: MessageKey) -> tuple[MessageArrival, float]:
        """Return a posted message that has arrived, and the time at which its receive was posted."""
        self._used.add(key)
        return self._arrived.pop(key), self._posted.pop(key)

    def _begin(self, turn: tuple[int, int]) -> None:
        """Begin another attempt: drop the messages and receives of earlier ones."""
        self._turn = turn
        # Messages of earlier attempts are known by their turn from now on.
        self._used.clear()
        for key in [key for key in self._arrived if key.turn < turn]:
            arrival = self._arrived.pop(key)
            self.stale += 1
            # The others were acknowledged when they arrived.
            if key not in self._posted:
                self._owe(arrival)
        for key in [key for key in self._posted if key.turn < turn]:
            del self._posted[key]

    def _owe(self, arrival: MessageArrival) -> None:
        if arrival.sequence is not None:
            self.due.append(arrival.sequence)


@dataclass(eq=False, slots=True)
class Outgoing:
    """One unacknowledged message; keeps its bytes alive."""

    sequence: int
    key: MessageKey | None
    """None for a note or a probe."""
    number: int
    """Number among all messages of the directed link, or among its notes, or probes."""
    payload: Payload
    posted_s: float
    written: bool = False
    """True while it is in the ring of the present session, or its turn to be written."""
    written_nbytes: int = 0
    """Bytes of it that are in the ring of the present session: a message is written in parts."""
    elsewhere: bool = False
    """True if another path carries it now: the receiver does not wait for this one."""
    probe: bool = False
    """True for a probe, False for a note; for messages, False."""


class RetransmitQueue:
    """Unacknowledged messages in the order of posting; notes and probes are written first. Not thread-safe."""

    def __init__(self, window_messages: int, window_nbytes: int) -> None:
        """Most messages and bytes to have in flight; a single message may be larger, and notes do not count."""
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
        """Number of messages that the receiver may wait for."""
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
        """Return the messages that the receiver may wait for, in the order of posting; `elsewhere`: all."""
        everything = [each for each in self._unacknowledged.values() if each.key is not None]
        return [each for each in everything if elsewhere or not each.elsewhere]

    @property
    def probing(self) -> bool:
        """Return whether a probe is in flight, even a discarded one, as the receiver has memory for only one."""
        return any(message.probe for message in self._unacknowledged.values())

    def oldest(self) -> Outgoing | None:
        """Return the message that the receiver has waited for longest."""
        messages = (each for each in self._unacknowledged.values() if each.key is not None and not each.elsewhere)
        return next(messages, None)

    def next_to_write(self) -> Outgoing | None:
        """Return the next item for the ring: a note or probe, or a message if the window has room."""
        if self._unwritten_notes:
            return next(iter(self._unwritten_notes.values()))
        full = self._written_messages >= self._window_messages or self._written_nbytes >= self._window_nbytes
        return None if full or not self._unwritten else next(iter(self._unwritten.values()))

    def mark_written(self, message: Outgoing) -> None:
        """Count a message as in flight; called before its first byte is written."""
        message.written = True
        del self._line(message)[message.sequence]
        if message.key is not None:
            self._written_messages += 1
            self._written_nbytes += message.payload.nbytes

    def mark_unwritten(self, message: Outgoing) -> None:
        """Queue a message again that was not written completely. Does nothing if it has been acknowledged."""
        if message.written and message.sequence in self._unacknowledged:
            self._forget(message)
            line = self._line(message)
            line[message.sequence] = message
            # To the front: it is older than all messages that have not been written.
            line.move_to_end(message.sequence, last=False)

    def rewind(self) -> None:
        """Queue all unacknowledged messages again, for a new session."""
        # In reverse, since each goes to the front of its queue.
        for message in reversed(self._unacknowledged.values()):
            self.mark_unwritten(message)
            message.written_nbytes = 0

    def send_elsewhere(self, message: Outgoing) -> None:
        """Record that another path carries the message. It stays: a part may have arrived under its sequence number."""
        if not message.elsewhere:
            message.elsewhere = True
            self._elsewhere += 1

    def send_after_all(self, message: Outgoing) -> None:
        """Record that the other path did not deliver the message."""
        if message.elsewhere:
            message.elsewhere = False
            self._elsewhere -= 1

    def acknowledge(self, sequence: int) -> Outgoing | None:
        """Remove a message and return it; None if it has been acknowledged before."""
        message = self._unacknowledged.pop(sequence, None)
        if message is None:
            return None
        self._notes -= message.key is None
        self._elsewhere -= message.elsewhere
        if message.written:
            self._forget(message)
        else:  # it was written in a former session, whose end was seen before its acknowledgement
            del self._line(message)[sequence]
        return message

    def _line(self, message: Outgoing) -> OrderedDict[int, Outgoing]:
        return self._unwritten_notes if message.key is None else self._unwritten

    def _forget(self, message: Outgoing) -> None:
        message.written = False
        if message.key is not None:
            self._written_messages -= 1
            self._written_nbytes -= message.payload.nbytes
