# SPDX-License-Identifier: Apache-2.0
"""Queue the messages to one neighbour until it has acknowledged them, and messages from it until they are used."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from adaptra_megatron.transport.gpu.copies import Payload, Receipt
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.gpu.host_copies import HostPayload
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import MessageKey

OVERDUE_S = 0.2
"""Longest time for the host path to get a note acknowledged before the control connection carries it too."""


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
        self.noted_below = 0
        """Number below which all notes have arrived."""
        self._early_notes: dict[int, bytes] = {}

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

    def take_note(self, number: int, packet: bytes) -> list[bytes]:
        """Take in a note; return those that can be read now, in order. Duplicates change nothing."""
        if number >= self.noted_below:
            self._early_notes[number] = packet
        readable = []
        while (due := self._early_notes.pop(self.noted_below, None)) is not None:
            readable.append(due)
            self.noted_below += 1
        return readable

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
    """One unacknowledged message, note or probe; keeps its bytes alive."""

    key: MessageKey | None
    """None for a note or a probe."""
    number: int
    """Number among all messages of the directed link, on either path, or among its notes, or probes."""
    computed: Computed
    posted_s: float
    path: Path = Path.HOST
    """Path that carries it."""
    probe: bool = False
    """True for a probe, False for a note; for messages, False."""
    sequence: int = -1
    """Sequence number of the host path; -1: that has not begun to carry it."""
    payload: Payload = field(init=False)
    """For the host path."""
    written: bool = False
    """True while it is in the ring of the present session, or its turn to be written."""
    written_nbytes: int = 0
    """Bytes of it that are in the ring of the present session: a message is written in parts."""
    on_line: bool = False
    """True for a note put on the control connection since that last came up."""


class RetransmitQueue:
    """Everything sent over a link until the peer has acknowledged it, whichever path carries it. Not thread-safe.

    1. A message belongs to the path that carries it, and is delivered once either path has acknowledged it.
    2. What the host path has begun to carry has a sequence number and stays there until the host path has acknowledged
       it, too: part of it may have arrived, and the peer expects all of them.
    3. Notes and probes are written first. A note that is not acknowledged within OVERDUE_S goes by the control
       connection, too.
    """

    def __init__(
        self,
        window_messages: int,
        window_nbytes: int,
        stage: Callable[[Computed], Payload],
        send_note: Callable[[int, bytes], None],
    ) -> None:
        """Most messages and bytes to have in flight on the host path; a single message may be larger, and notes do not
        count. `stage`: see Copies. `send_note(number, packet)` puts a note on the control connection and returns at
        once. If that connection breaks, the note is lost.
        """
        self._window_messages, self._window_nbytes = window_messages, window_nbytes
        self._stage, self._send_note = stage, send_note
        self._messages: dict[Outgoing, None] = {}
        """Undelivered messages of both paths, in the order of posting."""
        self._notes: dict[Outgoing, None] = {}
        self._sequenced: OrderedDict[int, Outgoing] = OrderedDict()
        """Messages, notes and probes that the host path has not acknowledged, by sequence number."""
        self._unwritten: OrderedDict[Outgoing, None] = OrderedDict()
        self._unwritten_notes: OrderedDict[Outgoing, None] = OrderedDict()
        self._next_sequence = self._next_note = 0
        self._written_messages = self._written_nbytes = 0

    def __len__(self) -> int:
        """Number of undelivered messages."""
        return len(self._messages)

    def post(self, key: MessageKey, number: int, computed: Computed, now_s: float, path: Path = Path.HOST) -> Outgoing:
        """Append a message. Raises TransportError if the device failed."""
        message = Outgoing(key, number, computed, now_s, path)
        if path is Path.HOST:
            self._append(message, self._stage(computed))
        self._messages[message] = None
        return message

    def post_note(self, packet: bytes, now_s: float) -> None:
        """Append a note."""
        tensor = torch.frombuffer(bytearray(packet), dtype=torch.uint8)
        note = Outgoing(None, self._next_note, Computed(tensor, None), now_s)
        self._append(note, HostPayload(tensor))
        self._notes[note] = None
        self._next_note += 1

    def post_probe(self, number: int, computed: Computed, now_s: float) -> None:
        """Append a probe of the host path. Raises TransportError if the device failed."""
        self._append(Outgoing(None, number, computed, now_s, probe=True), self._stage(computed))

    def carry(self, message: Outgoing, path: Path) -> None:
        """Have `path` carry a message from now on, unless it was delivered. Raises TransportError if the device
        failed.
        """
        message.path = path
        if message.sequence >= 0 or message not in self._messages:
            return
        if path is Path.HOST:
            self._append(message, self._stage(message.computed))
        else:
            self._unwritten.pop(message, None)  # it is not there if the device failed as it was staged

    def messages(self, path: Path) -> list[Outgoing]:
        """Return the undelivered messages that `path` carries, in the order of posting."""
        return [each for each in self._messages if each.path is path]

    @property
    def probing(self) -> bool:
        """Return whether a probe is in flight, even a discarded one, as the receiver has memory for only one."""
        return any(each.probe for each in (*self._unwritten_notes, *self._sequenced.values()))

    def oldest(self) -> Outgoing | None:
        """Return the message that the receiver has waited for longest."""
        return next(iter(self._messages), None)

    def next_to_write(self) -> Outgoing | None:
        """Return the next item for the ring: a note or probe, or a message if the window has room."""
        if self._unwritten_notes:
            return next(iter(self._unwritten_notes))
        full = self._written_messages >= self._window_messages or self._written_nbytes >= self._window_nbytes
        return None if full else next(iter(self._unwritten), None)

    def mark_written(self, message: Outgoing) -> None:
        """Count a message as in flight; called before its first byte is written."""
        message.written = True
        del self._line(message)[message]
        if message.sequence < 0:
            message.sequence = self._next_sequence
            self._next_sequence += 1
            self._sequenced[message.sequence] = message
        if message.key is not None:
            self._written_messages += 1
            self._written_nbytes += message.payload.nbytes

    def mark_unwritten(self, message: Outgoing) -> None:
        """Queue a message again that was not written completely. Does nothing if it has been acknowledged."""
        if message.written and message.sequence in self._sequenced:
            self._forget(message)
            line = self._line(message)
            line[message] = None
            # To the front: it is older than all messages that have not been written.
            line.move_to_end(message, last=False)

    def rewind(self) -> None:
        """Queue all that the host path has not acknowledged again, for a new session."""
        # In reverse, since each goes to the front of its queue.
        for message in reversed(self._sequenced.values()):
            self.mark_unwritten(message)
            message.written_nbytes = 0

    def acknowledge(self, sequence: int) -> Outgoing | None:
        """Remove what the host path has delivered and return it; None if it has been acknowledged before."""
        message = self._sequenced.pop(sequence, None)
        if message is None:
            return None
        self._messages.pop(message, None)
        self._notes.pop(message, None)
        if message.written:
            self._forget(message)
        else:  # it was written in a former session, whose end was seen before its acknowledgement
            del self._line(message)[message]
        return message

    def confirm(self, message: Outgoing) -> None:
        """Remove a message that the device path has delivered."""
        self._messages.pop(message, None)
        if message.sequence < 0:
            self._unwritten.pop(message, None)

    def noted(self, below: int) -> None:
        """Remove the notes below this number: the control connection has delivered them."""
        self._notes = {note: None for note in self._notes if note.number >= below}

    def on_reconnected(self) -> None:
        """Mark all notes as unsent: those on the former control connection may be lost."""
        for note in self._notes:
            note.on_line = False

    def send_overdue(self, now_s: float) -> None:
        """Put overdue notes on the control connection."""
        for note in self._notes:
            if not note.on_line and now_s >= note.posted_s + OVERDUE_S:
                note.on_line = True
                self._send_note(note.number, bytes(note.computed.tensor.tolist()))

    @property
    def overdue_from_s(self) -> float:
        """Return when the next note becomes overdue."""
        return min((note.posted_s for note in self._notes if not note.on_line), default=math.inf) + OVERDUE_S

    def _append(self, message: Outgoing, payload: Payload) -> None:
        message.payload = payload
        self._line(message)[message] = None

    def _line(self, message: Outgoing) -> OrderedDict[Outgoing, None]:
        return self._unwritten_notes if message.key is None else self._unwritten

    def _forget(self, message: Outgoing) -> None:
        message.written = False
        if message.key is not None:
            self._written_messages -= 1
            self._written_nbytes -= message.payload.nbytes
