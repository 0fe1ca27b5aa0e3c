# SPDX-License-Identifier: Apache-2.0
"""What docs/events.md and extras/events.schema.json say, made from the event classes and their fields' docstrings."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any

from markdown_table import markdown_table

from adaptra_megatron.telemetry import events

KINDS = typing.get_args(events.Event)

HEAD = """# Events

One JSON object per line in `RUN/events-*.jsonl`: the stamp's fields, `event` with the kind's name, and the kind's own
fields. Made from the code by `scripts/write_docs.py`. Kinds and fields are only ever added, so readers pass over what
they do not know; a number that is infinite or undefined is `null`. Iterations count from the start of the process, with
evaluations; `step` of `times` relates them to Megatron's. A JSON Schema of a line is in `extras/events.schema.json`.
"""


def events_page() -> str:
    """docs/events.md."""
    parts = [HEAD, "## The stamp of every event", _table(events.Stamp)]
    for kind in KINDS:
        parts += [f"## `{kind.name}`", _docstring(kind), _table(kind)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def events_schema() -> str:
    """extras/events.schema.json."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema of one line."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An event of adaptra-megatron",
        "oneOf": [_kind_schema(kind) for kind in KINDS],
    }


def _kind_schema(kind: type[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {"event": {"const": kind.name}}
    required = ["event"]
    for owner in (events.Stamp, kind):
        for field, hint, meaning in _fields(owner):
            properties[field.name] = {**_type_schema(hint), **({"description": meaning} if meaning else {})}
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.append(field.name)
    return {"type": "object", "description": _docstring(kind), "properties": properties, "required": required}


def _type_schema(hint: Any) -> dict[str, Any]:
    if isinstance(hint, UnionType):
        return {"anyOf": [_type_schema(option) for option in typing.get_args(hint)]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if origin is Sequence:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if hint is float:
        return {"type": ["number", "null"]}
    names = {int: "integer", str: "string", bool: "boolean", NoneType: "null"}
    return {"type": names[hint]} if hint in names else {}


def _table(kind: type[Any]) -> str:
    rows = []
    for field, hint, meaning in _fields(kind):
        optional = not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        rows.append((f"`{field.name}`", f"{_type_name(hint)}{' (may be missing)' if optional else ''}", meaning))
    return markdown_table(("field", "type", "meaning"), rows) if rows else "No fields of its own."


def _type_name(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Mapping:
        return f"object of {_type_name(arguments[1])}"
    if origin is Sequence:
        return f"array of {_type_name(arguments[0])}"
    return {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}.get(hint, "any")


def _fields(kind: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any, str]]:
    """Each field with its type and the docstring below it."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field, hints[field.name], _meanings()[kind.__name__, field.name]


@functools.cache
def _meanings() -> dict[tuple[str, str], str]:
    """Docstrings of fields, by class and field; "" for those that have none."""
    found = {}
    for definition in ast.parse(inspect.getsource(events)).body:
        if not isinstance(definition, ast.ClassDef):
            continue
        for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                text = ast.literal_eval(following.value) if documented else ""
                found[definition.name, statement.target.id] = " ".join(text.split())
    return found


def _docstring(kind: type[Any]) -> str:
    return " ".join(str(kind.__doc__).split())
