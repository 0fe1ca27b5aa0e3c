# SPDX-License-Identifier: Apache-2.0
"""What two training processes say to each other on a line: one JSON object per line of text."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import ClassVar

from adaptra_megatron.transport.tagged_json import kinds_of


@dataclass(frozen=True)
class Beat:
    """The sending process runs."""

    name: ClassVar[str] = "beat"


@dataclass(frozen=True)
class NoteCame:
    """A note of the link (notes.py), which the paths may bring too."""

    name: ClassVar[str] = "note"
    number: int
    text: str


@dataclass(frozen=True)
class Noted:
    """The answer: all notes below this number have come."""

    name: ClassVar[str] = "noted"
    below: int


@dataclass(frozen=True)
class Lost:
    """A stage of the pipeline is gone for good."""

    name: ClassVar[str] = "lost"
    stage: int
    cause: str


@dataclass(frozen=True)
class Bye:
    """The sending process closes the line on purpose."""

    name: ClassVar[str] = "bye"


LineMessage = Beat | NoteCame | Noted | Lost | Bye
_KINDS: dict[str, type[LineMessage]] = kinds_of(LineMessage)
_TYPES = {"int": int, "str": str}


def decode_line(packet: bytes) -> LineMessage:
    """A message from how it travels (`tagged_json.packed`). Raises ValueError for what no peer of ours says."""
    try:
        said = json.loads(packet)
        kind = _KINDS[said.pop("is")]
        wrong = [field.name for field in fields(kind) if type(said[field.name]) is not _TYPES[str(field.type)]]
        message = kind(**said)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise ValueError(f"this is no message of a line: {packet[:200]!r}") from cause
    if wrong or min([0, *(value for value in said.values() if isinstance(value, int))]) < 0:
        raise ValueError(f"{wrong or 'a number'} cannot be in a message of a line: {packet[:200]!r}")
    return message
