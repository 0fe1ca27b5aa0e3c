# SPDX-License-Identifier: Apache-2.0
"""Control messages ("notes") between the two ends of a directed link.

Wire format: one JSON object, at most NOTE_NBYTES, whose field "is" names the kind (the tag of each class below).

1. RetransmitQueue and ReceiveQueue deliver each note once and in order, as messages by the host path and, if it is not
   acknowledged in time, also by the control connection. The receiver drops duplicates and holds back notes that arrive
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

from typing import Annotated

import msgspec

from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, unpacked

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
