# SPDX-License-Identifier: Apache-2.0
"""What two training processes say to each other on a line: one JSON object per line of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptra_megatron.authentication.tagged_json import Natural, kinds_of, unpacked
from adaptra_megatron.transport.failover.control_messages import NOTE_NBYTES

LINE_NBYTES = 4 * NOTE_NBYTES
"""The longest message: a note that is quoted once more."""


@dataclass(frozen=True)
class Beat:
    """The sending process runs."""

    name: ClassVar[str] = "beat"


@dataclass(frozen=True)
class LinkNote:
    """A note of the link (control_messages.py), which the paths may bring too."""

    name: ClassVar[str] = "note"
    number: Natural
    text: str


@dataclass(frozen=True)
class LinkNoteAck:
    """The answer: all notes below this number have come."""

    name: ClassVar[str] = "noted"
    below: Natural


@dataclass(frozen=True)
class Lost:
    """A rank is gone for good."""

    name: ClassVar[str] = "lost"
    rank: Natural
    cause: str


@dataclass(frozen=True)
class Fin:
    """The sending process closes the line on purpose."""

    name: ClassVar[str] = "bye"
    cause: str | None = None
    """Why it ends the link though messages may be under way; None where it has no further use for it."""


LineMessage = Beat | LinkNote | LinkNoteAck | Lost | Fin
_KINDS: dict[str, type[LineMessage]] = kinds_of(LineMessage)


def decode_line(packet: bytes) -> LineMessage:
    """A message from how it travels (`tagged_json.packed`). Raises ValueError for what no peer of ours says."""
    try:
        message: LineMessage = unpacked(packet, _KINDS, LINE_NBYTES)
    except ValueError as cause:
        raise ValueError(f"this is no message of a line ({cause}): {packet[:200]!r}") from cause
    return message
