# SPDX-License-Identifier: Apache-2.0
"""Control messages ("notes") between the two ends of a directed link, and the channel that delivers them.

Wire format: one JSON object, at most NOTE_NBYTES, whose field "is" names the kind (`name` of each class below).

1. ControlChannel delivers each note once and in order. Each is sent by the host path; if not acknowledged within
   OVERDUE_S, by the control connection too. The receiver drops doubles and holds back what comes early.
2. Fields are typed and bounded. An unknown kind, a missing, additional or impossible field is a ValueError, upon which
   the session or connection that brought the note ends. There is no version field: all ranks of a job are to run one
   version of the package.
3. `session` numbers the process groups made for the device path; `number` counts the messages of the directed link by
   whatever path, in the order of posting, which both ends know; `index` counts what a session carried, probes included.
4. A note of an earlier session changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, unpacked

# Brings notes to the peer once and in order: by the host path, and by the link's line while that does not answer.

OVERDUE_S = 0.2
"""How long the host path has for a note before it goes by the line too."""


class ControlChannel:
    """Numbers and order of both directions of one link. Not safe for threads: the link's lock guards it."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        """`send(number, packet)` puts a note on the line. Returns at once; it may be lost if the line breaks."""
        self._send = send
        self._posted = 0
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._unacknowledged: dict[int, tuple[bytes, float]] = {}
        self._sent: set[int] = set()
        """Numbers that have been put on the line since it last came up."""

    def post(self, packet: bytes, now_s: float) -> int:
        """A new note: returns the number under which the host path is to carry it."""
        number = self._posted
        self._posted += 1
        self._unacknowledged[number] = (packet, now_s)
        return number

    def acknowledged(self, number: int) -> None:
        """The peer has it."""
        self._unacknowledged.pop(number, None)

    def noted(self, below: int) -> None:
        """The peer has all below this number."""
        for number in [number for number in self._unacknowledged if number < below]:
            del self._unacknowledged[number]

    def on_reconnected(self) -> None:
        """What was put on the line before may be lost."""
        self._sent.clear()

    def send_overdue(self, now_s: float) -> None:
        """Put on the line what the host path has not brought in time."""
        for number, (packet, posted_s) in self._unacknowledged.items():
            if number not in self._sent and now_s >= posted_s + OVERDUE_S:
                self._sent.add(number)
                self._send(number, packet)

    @property
    def overdue_from_s(self) -> float:
        """Return when the next note is to go by the line."""
        unsent = (posted_s for number, (_, posted_s) in self._unacknowledged.items() if number not in self._sent)
        return min(unsent, default=math.inf) + OVERDUE_S

    def take(self, number: int, packet: bytes) -> list[bytes]:
        """A note has come: what can be read now, in order. Doubles change nothing."""
        if number >= self._next:
            self._early[number] = packet
        readable = []
        while (due := self._early.pop(self._next, None)) is not None:
            readable.append(due)
            self._next += 1
        return readable

    @property
    def acknowledged_below(self) -> int:
        """All notes below this number have come."""
        return self._next


NOTE_NBYTES = 1 << 16
"""The longest control message that is written or read."""
MOST_PROBES = 64
"""Most probes in a burst."""
MOST_NBYTES = 1 << 32
"""Largest message that a control message may name."""


class CreateSession(TaggedMessage, tag="meet", frozen=True):
    """From the sender: let us make the process group of this session."""

    session: Natural


class Open(TaggedMessage, tag="open", frozen=True):
    """From the sender: messages from `number` on go by the device path, until further notice."""

    session: Natural
    number: Natural
    skipped: list[Natural] = []
    """Beyond `number`, yet not sent: the receiver has them."""


class Close(TaggedMessage, tag="close", frozen=True):
    """Sender to receiver: stop using the device path; answered by Frozen."""

    session: Natural


class ReceivePosted(TaggedMessage, tag="frozen", frozen=True):
    """From the receiver, in answer to Close: before `number`, messages are already expected on the device path."""

    session: Natural
    number: Natural


class SwitchAt(TaggedMessage, tag="until", frozen=True):
    """From the sender: messages from `number` on go by the host path."""

    session: Natural
    number: Natural


class Failed(TaggedMessage, tag="failed", frozen=True):
    """From the sender: it saw the device session fail."""

    session: Natural
    cause: str


class Dead(TaggedMessage, tag="dead", frozen=True):
    """From the receiver: the session is over; of all that it carried, the first `received` have arrived."""

    session: Natural
    received: Natural
    cause: str


class QuerySent(TaggedMessage, tag="ask", frozen=True):
    """From the receiver: all before this index have arrived; has the message of this index been sent?"""

    session: Natural
    index: Natural


class SentCount(TaggedMessage, tag="sent", frozen=True):
    """From the sender, in answer to Ask: yes, as all before `count`; the message asked for has so many bytes."""

    session: Natural
    count: Natural
    nbytes: Natural


class Received(TaggedMessage, tag="received", frozen=True):
    """From the receiver, where acknowledgements cannot go by the host path: the first `count` have arrived."""

    session: Natural
    count: Natural


class Measure(TaggedMessage, tag="measure", frozen=True):
    """From the sender, whose messages go by the host path: next on the device path come `count` probes of `nbytes`."""

    session: Natural
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROBES)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_NBYTES)]


class ReadyForProbe(TaggedMessage, tag="awaiting", frozen=True):
    """From the receiver, in answer to Measure: these probes can come."""

    session: Natural


class Probed(TaggedMessage, tag="probed", frozen=True):
    """From the receiver: a probe that measures the device path has arrived, at this moment of its clock."""

    session: Natural
    index: Natural
    arrived_s: float


class HostProbed(TaggedMessage, tag="host_probed", frozen=True):
    """From the receiver: this probe of the host path has arrived, at this moment of its clock."""

    number: Natural
    arrived_s: float


FromSender = CreateSession | Open | Close | SwitchAt | Failed | SentCount | Measure
FromReceiver = ReceivePosted | Dead | QuerySent | Received | ReadyForProbe | Probed
Note = FromSender | FromReceiver | HostProbed


def decode_note(packet: bytes) -> Note:
    """A note from how it travels (`typed_messages.packed`). Raises ValueError for what no peer of ours says."""
    note: Note = unpacked(packet, Note, NOTE_NBYTES)
    return note
