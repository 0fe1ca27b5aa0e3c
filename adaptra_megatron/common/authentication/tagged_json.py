# SPDX-License-Identifier: Apache-2.0
"""Encode and decode messages between processes as JSON objects of declared types. Nothing is built of what came before
it has been checked.

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
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

Reading = Callable[[Any], Any]

_NUMBERS = range(-(1 << 63), 1 << 64)


class Reader(Protocol):
    """Further condition, in `Annotated`, of a field."""

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
    if isinstance(kinds, Mapping):
        name = value.pop("is", None) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(f"a message is of no known kind: {packet[:100]!r}")
        kinds = kinds[name]
    try:
        return typed(kinds, value)
    except ValueError as cause:
        raise ValueError(f"a message has an invalid field: {cause}") from cause


def plain(value: Any) -> Any:
    """Return what JSON can say of a value; `typed` makes the value of it again."""
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
    return value.item()  # one of numpy's numbers


def typed(kind: Any, value: Any) -> Any:
    """The value of type `kind` that JSON says. Raises ValueError unless it is one, with all of its fields."""
    return _reading(kind)(value)


def _reading(kind: Any) -> Reading:
    """Return how values of `kind` are read, so that a type is looked at once and not with each value."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        reader = arguments[1]
        first = _reading(arguments[0])
        return lambda value: reader.read(first(value))
    if origin in (Union, types.UnionType):
        return functools.partial(_either, tuple(map(_reading, arguments)))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        element = _reading(arguments[0])
        return lambda value: origin(map(element, _list(kind, value)))
    if origin is tuple:
        elements = tuple(map(_reading, arguments))
        return lambda value: tuple(
            read(each) for read, each in zip(elements, _list(kind, value, len(elements)), strict=True)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = map(_reading, arguments)
        return lambda value: {
            key(name): item(each) for name, each in (_list(kind, pair, 2) for pair in _list(kind, value))
        }
    is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return functools.partial(_record if is_record else _scalar, kind)


def _scalar(kind: Any, value: Any) -> Any:
    if kind in (int, float) and type(value) is int and value in _NUMBERS:
        return kind(value)
    if kind in (float, bool, str, type(None)) and type(value) is kind:
        return value
    if kind is bytes and type(value) is str:
        return base64.b64decode(value, validate=True)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and type(value) in (str, int):
        return kind(value)
    raise _mismatch(kind, value)


def _record(kind: Any, value: Any) -> Any:
    """A dataclass, which travels by names, or a NamedTuple, which does by places."""
    fields, by_name = _fields(kind), dataclasses.is_dataclass(kind)
    if by_name and isinstance(value, dict) and value.keys() == fields.keys():
        return kind(**{name: read(value[name]) for name, read in fields.items()})
    if not by_name and isinstance(value, list) and len(value) == len(fields):
        return kind(*(read(each) for read, each in zip(fields.values(), value, strict=True)))
    raise _mismatch(kind, value)


def _list(kind: Any, value: Any, length: int | None = None) -> list[Any]:
    if isinstance(value, list) and length in (None, len(value)):
        return value
    raise _mismatch(kind, value)


def _either(readings: tuple[Reading, ...], value: Any) -> Any:
    for reading in readings[:-1]:
        try:
            return reading(value)
        except ValueError:
            continue
    return readings[-1](value)


@functools.cache
def _fields(kind: Any) -> dict[str, Reading]:
    """Fields of a dataclass or NamedTuple, in order."""
    hints = get_type_hints(kind, include_extras=True)
    names = (field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else kind._fields
    return {name: _reading(hints[name]) for name in names}


def _mismatch(kind: Any, value: Any) -> ValueError:
    return ValueError(f"{str(value)[:100]!r} is no {getattr(kind, '__name__', kind)}")
