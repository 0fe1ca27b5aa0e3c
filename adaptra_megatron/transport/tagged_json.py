# SPDX-License-Identifier: Apache-2.0
"""What crosses processes: JSON objects of declared types. Nothing is built of what came before it has been checked.

A message is a frozen dataclass, or a NamedTuple, of numbers, texts, bytes, enumerations, lists, tuples, mappings and
others of its kind. One that goes where several kinds are expected has a `name`, which "is" says. Neither torch nor
numpy here: the delegate imports this.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import types
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

_NUMBERS = range(-(1 << 63), 1 << 64)


class Reader(Protocol):
    """What `Annotated` may hold: a further condition of a field, or how to make the field of what `travels_as` another
    type, if there is that attribute."""

    def read(self, value: Any) -> Any:
        """The field's value, of one that has the type that is annotated. Raises ValueError."""


@dataclasses.dataclass(frozen=True)
class Below:
    """A natural number below a limit."""

    limit: int

    def read(self, value: int) -> int:
        """Raises ValueError for any other."""
        if not 0 <= value < self.limit:
            raise ValueError(f"{value} is not in 0..{self.limit - 1}")
        return value


Natural = Annotated[int, Below(1 << 64)]


def kinds_of(union: Any) -> dict[str, type[Any]]:
    """The members of a union of message kinds, by name."""
    return {kind.name: kind for kind in get_args(union)}


def packed(message: Any) -> bytes:
    """A message as it travels; with its name, if it has one."""
    body = plain(message)
    return json.dumps({"is": message.name, **body} if hasattr(message, "name") else body).encode()


def unpacked(packet: bytes, kinds: Mapping[str, type[Any]] | Any, most_nbytes: int) -> Any:
    """A message of one of `kinds` (by name), or of this one type. Raises ValueError for anything else."""
    if len(packet) > most_nbytes:
        raise ValueError(f"a message of {len(packet)} bytes exceeds the limit of {most_nbytes}")
    try:
        value = json.loads(packet)
    except RecursionError as cause:
        raise ValueError("a message is nested too deep") from cause
    if not isinstance(kinds, Mapping):
        return typed(kinds, value)
    name = value.pop("is", None) if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"a message is of no known kind: {packet[:100]!r}")
    return typed(kinds[name], value)


def plain(value: Any) -> Any:
    """What JSON can say of a value; `typed` makes the value of it again."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, int | float | str) or value is None:
        return value
    return plain(value.tobytes() if value.ndim else value.item())  # numpy's arrays and numbers


def typed(kind: Any, value: Any) -> Any:
    """The value of type `kind` that JSON says. Raises ValueError unless it is one, with all of its fields."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        reader = arguments[1]
        return reader.read(typed(getattr(reader, "travels_as", arguments[0]), value))
    if origin in (Union, types.UnionType):
        return _either(arguments, value)
    if kind in (int, float) and type(value) is int and value in _NUMBERS:
        return kind(value)
    if kind in (float, bool, str, type(None)) and type(value) is kind:
        return value
    if kind is bytes and type(value) is str:
        return base64.b64decode(value, validate=True)
    if isinstance(value, list) and (read := _of_list(kind, origin, arguments, value)) is not None:
        return read
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        names = {field.name for field in dataclasses.fields(kind)}
        if value.keys() == names:
            return kind(**{name: typed(hints[name], each) for name, each in value.items()})
    elif isinstance(kind, type) and issubclass(kind, enum.Enum) and type(value) in (str, int):
        return kind(value)
    raise ValueError(f"{str(value)[:100]!r} is no {getattr(kind, '__name__', kind)}")


def _of_list(kind: Any, origin: Any, arguments: tuple[Any, ...], value: list[Any]) -> Any:
    """None if that is no `kind`."""
    if origin is list:
        return [typed(arguments[0], each) for each in value]
    if origin is tuple and arguments[1:] == (...,):
        return tuple(typed(arguments[0], each) for each in value)
    if origin is tuple and len(arguments) == len(value):
        return tuple(map(typed, arguments, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) == len(value):
            return {typed(arguments[0], key): typed(arguments[1], item) for key, item in pairs}
    if isinstance(kind, type) and issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(value):
        hints = _hints(kind)
        return kind(*(typed(hints[name], each) for name, each in zip(kind._fields, value, strict=True)))  # type: ignore[attr-defined]
    return None


def _either(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds[:-1]:
        try:
            return typed(kind, value)
        except ValueError:
            continue
    return typed(kinds[-1], value)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
