# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a directed link tell each other about its device path.

Notes arrive once and in order, over whichever of host path and job store works. "Session" numbers the process groups
made for the device path; "number" counts all messages of the directed link, by whatever path, in the order of posting,
which is the same at both ends; "index" counts what a session has carried, probes included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from adaptra_megatron.authentication.tagged_json import Below, Natural, kinds_of, unpacked

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
