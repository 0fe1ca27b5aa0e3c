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
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from adaptra_megatron.common.authentication.tagged_json import Below, Natural, kinds_of, unpacked

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


@dataclass(frozen=True)
class CreateSession:
    """From the sender: let us make the process group of this session."""

    name: ClassVar[str] = "meet"
    session: Natural


@dataclass(frozen=True)
class Open:
    """From the sender: messages from `number` on go by the device path, until further notice."""

    name: ClassVar[str] = "open"
    session: Natural
    number: Natural
    skipped: list[Natural] = field(default_factory=list)
    """Beyond `number`, yet not sent: the receiver has them."""


@dataclass(frozen=True)
class Close:
    """Sender to receiver: stop using the device path; answered by Frozen."""

    name: ClassVar[str] = "close"
    session: Natural


@dataclass(frozen=True)
class ReceivePosted:
    """From the receiver, in answer to Close: before `number`, messages are already expected on the device path."""

    name: ClassVar[str] = "frozen"
    session: Natural
    number: Natural


@dataclass(frozen=True)
class SwitchAt:
    """From the sender: messages from `number` on go by the host path."""

    name: ClassVar[str] = "until"
    session: Natural
    number: Natural


@dataclass(frozen=True)
class Failed:
    """From the sender: it saw the device session fail."""

    name: ClassVar[str] = "failed"
    session: Natural
    cause: str


@dataclass(frozen=True)
class Dead:
    """From the receiver: the session is over; of all that it carried, the first `received` have arrived."""

    name: ClassVar[str] = "dead"
    session: Natural
    received: Natural
    cause: str


@dataclass(frozen=True)
class QuerySent:
    """From the receiver: all before this index have arrived; has the message of this index been sent?"""

    name: ClassVar[str] = "ask"
    session: Natural
    index: Natural


@dataclass(frozen=True)
class SentCount:
    """From the sender, in answer to Ask: yes, as all before `count`; the message asked for has so many bytes."""

    name: ClassVar[str] = "sent"
    session: Natural
    count: Natural
    nbytes: Natural


@dataclass(frozen=True)
class Received:
    """From the receiver, where acknowledgements cannot go by the host path: the first `count` have arrived."""

    name: ClassVar[str] = "received"
    session: Natural
    count: Natural


@dataclass(frozen=True)
class Measure:
    """From the sender, whose messages go by the host path: next on the device path come `count` probes of `nbytes`."""

    name: ClassVar[str] = "measure"
    session: Natural
    count: Annotated[int, Below(MOST_PROBES + 1)]
    nbytes: Annotated[int, Below(MOST_NBYTES + 1)]


@dataclass(frozen=True)
class ReadyForProbe:
    """From the receiver, in answer to Measure: these probes can come."""

    name: ClassVar[str] = "awaiting"
    session: Natural


@dataclass(frozen=True)
class Probed:
    """From the receiver: a probe that measures the device path has arrived, at this moment of its clock."""

    name: ClassVar[str] = "probed"
    session: Natural
    index: Natural
    arrived_s: float


@dataclass(frozen=True)
class HostProbed:
    """From the receiver: this probe of the host path has arrived, at this moment of its clock."""

    name: ClassVar[str] = "host_probed"
    number: Natural
    arrived_s: float


FromSender = CreateSession | Open | Close | SwitchAt | Failed | SentCount | Measure
FromReceiver = ReceivePosted | Dead | QuerySent | Received | ReadyForProbe | Probed
Note = FromSender | FromReceiver | HostProbed
_KINDS: dict[str, type[Note]] = kinds_of(Note)


def decode_note(packet: bytes) -> Note:
    """A note from how it travels (`tagged_json.packed`). Raises ValueError for what no peer of ours says."""
    note: Note = unpacked(packet, _KINDS, NOTE_NBYTES)
    return note
