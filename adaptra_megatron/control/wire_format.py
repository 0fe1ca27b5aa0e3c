# SPDX-License-Identifier: Apache-2.0
"""MessagePack of declared types, for what processes say to each other in every iteration: one call of compiled code
each way, because a training process has a millisecond of CPU for all that it exchanges.

A message is a frozen dataclass, or a NamedTuple, as in `tagged_json`. No torch here: the planner process imports this.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")


def _plain(value: Any) -> Any:
    """The number that one of numpy's scalars is."""
    return value.item()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encoded(message: Any) -> bytes:
    """A message as it travels."""
    return _ENCODER.encode(message)


class Decoder(Generic[Message]):
    """Makes messages of one type again. Nothing is built of what came before it has been checked."""

    def __init__(self, kind: type[Message], most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, packet: bytes | msgspec.Raw) -> Message:
        """Raises ValueError for anything but a message of that type."""
        if len(packet) > self._most_nbytes:
            raise ValueError(f"a message of {len(packet)} bytes exceeds the limit of {self._most_nbytes}")
        try:
            return self._decode(packet)
        except (msgspec.MsgspecError, RecursionError) as cause:
            raise ValueError(f"a message has an invalid field: {cause}") from cause
