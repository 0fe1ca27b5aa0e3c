# SPDX-License-Identifier: Apache-2.0
"""Control messages ("notes") between the two ends of a directed link, and the channel that delivers them.

Wire format: one JSON object, at most NOTE_NBYTES, whose field "is" names the kind (the tag of each class below).

1. ControlChannel delivers each note once and in order. Each is sent by the host path and, if it is not acknowledged
   within OVERDUE_S, also by the control connection. The receiver drops duplicates and holds back notes that arrive
   early.
2. Fields are typed and bounded. An unknown kind, or a missing, additional or impossible field, is a ValueError, which
   ends the session or connection that brought the note. There is no version field: all ranks of a job are to run one
   version of the package.
3. `session` numbers the process groups made for the device path. `number` counts the messages of the directed link on
   either path, in the order of posting, which both ends know. `index` counts the messages of a session, probes
   included.
4. A note of an earlier session changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, unpacked

OVERDUE_S = 0.2
"""Longest time for the host path to get a note acknowledged before the control connection carries it too."""


class ControlChannel:
    """Numbers and orders the notes of both directions of a link. Not thread-safe: callers hold the link's lock."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        """`send(number, packet)` puts a note on the control connection and returns at once. If that connection breaks,
        the note is lost.
        """
        self._send = send
        self._posted = 0
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._unacknowledged: dict[int, tuple[bytes, float]] = {}
        self._sent: set[int] = set()
        """Notes put on the control connection since it last came up."""

    def post(self, packet: bytes, now_s: float) -> int:
        """Keep a new note until it is acknowledged; return its number."""
        number = self._posted
        self._posted += 1
        self._unacknowledged[number] = (packet, now_s)
        return number

    def acknowledged(self, number: int) -> None:
        """Release the note of this number, which the peer has."""
        self._unacknowledged.pop(number, None)

    def noted(self, below: int) -> None:
        """Release all notes below this number: the peer has acknowledged them."""
        for number in [number for number in self._unacknowledged if number < below]:
            del self._unacknowledged[number]

    def on_reconnected(self) -> None:
        """Mark all notes as unsent: notes on the former control connection may be lost."""
        self._sent.clear()

    def send_overdue(self, now_s: float) -> None:
        """Put overdue notes on the control connection."""
        for number, (packet, posted_s) in self._unacknowledged.items():
            if number not in self._sent and now_s >= posted_s + OVERDUE_S:
                self._sent.add(number)
                self._send(number, packet)

    @property
    def overdue_from_s(self) -> float:
        """Return when the next note becomes overdue."""
        unsent = (posted_s for number, (_, posted_s) in self._unacknowledged.items() if number not in self._sent)
        return min(unsent, default=math.inf) + OVERDUE_S

    def take(self, number: int, packet: bytes) -> list[bytes]:
        """Process a note; return the notes that can be read now, in order. Duplicates change nothing."""
        if number >= self._next:
            self._early[number] = packet
        readable = []
        while (due := self._early.pop(self._next, None)) is not None:
            readable.append(due)
            self._next += 1
        return readable

    @property
    def acknowledged_below(self) -> int:
        """Number below which all notes have arrived."""
        return self._next


NOTE_NBYTES = 1 << 16
"""Largest note, in bytes."""
MOST_PROBES = 64
"""Most probes in a burst."""
MOST_NBYTES = 1 << 32
"""Largest message that a note may name, in bytes."""


class CreateSession(TaggedMessage, tag="meet", frozen=True):
    """From the sender: make the process group of this session."""

    session: Natural


class Open(TaggedMessage, tag="open", frozen=True):
    """From the sender: messages from `number` on take the device path."""

    session: Natural
    number: Natural
    skipped: list[Natural] = []
    """Numbers beyond `number` that are not sent again: the receiver has their messages."""


class Close(TaggedMessage, tag="close", frozen=True):
    """From the sender: stop using the device path; answered by ReceivePosted."""

    session: Natural


class ReceivePosted(TaggedMessage, tag="frozen", frozen=True):
    """From the receiver, in answer to Close: receives before `number` are already posted on the device path."""

    session: Natural
    number: Natural


class SwitchAt(TaggedMessage, tag="until", frozen=True):
    """From the sender, in answer to ReceivePosted: messages from `number` on take the host path."""

    session: Natural
    number: Natural


class Failed(TaggedMessage, tag="failed", frozen=True):
    """From the sender: it saw the device session fail."""

    session: Natural
    cause: str


class Dead(TaggedMessage, tag="dead", frozen=True):
    """From the receiver: the session has ended, and the first `received` of its messages have arrived."""

    session: Natural
    received: Natural
    cause: str


class QuerySent(TaggedMessage, tag="ask", frozen=True):
    """From the receiver: asks whether message `index` of the session was sent. All earlier ones have arrived."""

    session: Natural
    index: Natural


class SentCount(TaggedMessage, tag="sent", frozen=True):
    """From the sender, in answer to QuerySent: the session's first `count` messages have been sent; the queried message
    has `nbytes`.
    """

    session: Natural
    count: Natural
    nbytes: Natural


class Received(TaggedMessage, tag="received", frozen=True):
    """From the receiver, while the host path is down: the first `count` messages of the session have arrived."""

    session: Natural
    count: Natural


class Measure(TaggedMessage, tag="measure", frozen=True):
    """From the sender, while messages take the host path: `count` probes of `nbytes` follow on the device path."""

    session: Natural
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROBES)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_NBYTES)]


class ReadyForProbe(TaggedMessage, tag="awaiting", frozen=True):
    """From the receiver, in answer to Measure: receives of the probes are posted."""

    session: Natural


class Probed(TaggedMessage, tag="probed", frozen=True):
    """From the receiver: a device-path probe arrived at `arrived_s` (receiver's monotonic clock)."""

    session: Natural
    index: Natural
    arrived_s: float


class HostProbed(TaggedMessage, tag="host_probed", frozen=True):
    """From the receiver: host-path probe `number` arrived at `arrived_s` (receiver's monotonic clock)."""

    number: Natural
    arrived_s: float


FromSender = CreateSession | Open | Close | SwitchAt | Failed | SentCount | Measure
FromReceiver = ReceivePosted | Dead | QuerySent | Received | ReadyForProbe | Probed
Note = FromSender | FromReceiver | HostProbed


def decode_note(packet: bytes) -> Note:
    """Decode a note (`typed_messages.packed`). Raises ValueError for one that no sender writes."""
    note: Note = unpacked(packet, Note, NOTE_NBYTES)
    return note
