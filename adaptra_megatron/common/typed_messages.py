# SPDX-License-Identifier: Apache-2.0
"""Encode and decode the messages between processes of one run.

1. A message is a frozen dataclass or a NamedTuple; where several kinds may arrive, it is a `TaggedMessage`.
2. Decoding checks declared types, unknown fields of tagged messages, and a maximum size. It raises ValueError before
   any object is built.
3. `packed` makes JSON: one line of text, without infinities and NaNs. `encoded` makes MessagePack, for messages of
   every iteration: a training process can spend about a millisecond of CPU on all of them.
4. Messages exist only within one run, so both ends are of one release. Files that users keep have formats of their own.

This module imports neither torch nor numpy, because delegates and sidecar processes import it.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


def plain_text(text: str) -> str:
    """Return an error's text with undecodable bytes of file names escaped, which no message can carry."""
    return text.encode(errors="backslashreplace").decode()


class TaggedMessage(msgspec.Struct, frozen=True, tag_field="is", forbid_unknown_fields=True):
    """Message of one of several kinds, named by its tag: `class Ping(TaggedMessage, tag="ping", frozen=True)`."""

    def __repr__(self) -> str:
        # Messages are logged, and StartDelegate carries the job's secret.
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python number."""
    return value.item()


_JSON = msgspec.json.Encoder(enc_hook=_plain)
_MESSAGE_PACK = msgspec.msgpack.Encoder(enc_hook=_plain)


def packed(message: Any) -> bytes:
    """Encode a message as JSON."""
    return _JSON.encode(message)


def encoded(message: Any) -> bytes:
    """Encode a message as MessagePack."""
    return _MESSAGE_PACK.encode(message)


def unpacked(packet: bytes, kind: Any, max_nbytes: int) -> Any:
    """Decode a message of type `kind`, which may be a union, from JSON. Raises ValueError for anything else."""
    return _decoded(_json_decoder(kind), packet, max_nbytes)


class Decoder(Generic[Message]):
    """Decodes MessagePack messages of one type, which may be a union."""

    def __init__(self, kind: Any, max_nbytes: int) -> None:
        self._max_nbytes, self._decoder = max_nbytes, msgspec.msgpack.Decoder(kind)

    def __call__(self, packet: bytes | msgspec.Raw) -> Message:
        """Decode one message. Raises ValueError for anything but a message of that type."""
        message: Message = _decoded(self._decoder, packet, self._max_nbytes)
        return message


@functools.cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoded(decoder: Any, packet: bytes | msgspec.Raw, max_nbytes: int) -> Any:
    # Before decoding: a decoder would allocate in proportion to the packet.
    if len(packet) > max_nbytes:
        raise ValueError(f"a message of {len(packet)} bytes exceeds the limit of {max_nbytes}")
    try:
        return decoder.decode(packet)
    # msgspec raises RecursionError for deeply nested values, which any peer could send.
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"a message has an invalid field: {cause}") from cause
