# SPDX-License-Identifier: Apache-2.0
"""Imports point one way: between the package's rooms, and within each; Megatron is imported in few of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "adaptra_megatron"
ROOT = Path(__file__).parents[1]
FLOORS = (
    {"log", "sparing_log", "backoff", "child_process", "routable_data", "reasons", "foreign_errors"},
    {"post_import", "job_settings", "torch_release", "variables"},
    {"schedule", "detector"},
    {"authentication"},
    {"job"},
    {"launch"},
    {"transport"},
    {"data_parallel"},
    {"telemetry"},
    {"config", "given"},
    {"control"},
    {"epochs"},
    {"runtime"},
    {"patches"},
    {"bootstrap", "enabling", "auto", "emulation"},
    {"cli", "api", "__main__"},
)
"""From the ground up: what is on a floor imports from its own and from those below."""
MEGATRON = {"patches", f"{PACKAGE}.runtime.megatron", f"{PACKAGE}.emulation"}
"""What may import Megatron."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "patches").rglob("*.py")]):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(file.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


IMPORTS = {name: set(imported(tree)) for name, tree in modules()}


def room(name: str, within: str) -> str | None:
    """The part of `within` that a module is in; None for others, and for `within` itself."""
    return name.removeprefix(f"{within}.").partition(".")[0] if name.startswith(f"{within}.") else None


def test_floors_import_from_those_below() -> None:
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    upwards = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if (here := room(name, PACKAGE)) in floor
        and (there := room(other, PACKAGE)) in floor
        and floor[str(here)] < floor[str(there)]
    ]
    assert not upwards
    rooms = {
        file.stem for file in (ROOT / PACKAGE).iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()
    }
    assert rooms - set(floor) == {"__init__"}, "a room without a floor"


@pytest.mark.parametrize("within", [f"{PACKAGE}.{each}" for each in ("transport", "runtime", "emulation", "telemetry")])
def test_no_import_of_a_room_runs_back(within: str) -> None:
    graph: dict[str, set[str]] = {}
    for name, others in IMPORTS.items():
        if (here := room(name, within)) is not None:
            graph.setdefault(here, set()).update({room(other, within) or here for other in others} - {here})
    assert len(graph) > 3
    TopologicalSorter(graph).prepare()


def test_megatron_is_imported_where_it_may_be() -> None:
    importers = {name for name, others in IMPORTS.items() if any(other.split(".")[0] == "megatron" for other in others)}
    assert any(name.startswith(f"{PACKAGE}.runtime.megatron.") for name in importers)
    assert {name for name in importers if not any(f"{name}.".startswith(f"{each}.") for each in MEGATRON)} == set()


@pytest.mark.parametrize("pure", ["schedule", "detector"])
def test_what_is_pure_imports_neither_torch_nor_a_clock(pure: str) -> None:
    importers = [name for name in IMPORTS if name.startswith(f"{PACKAGE}.{pure}")]
    assert len(importers) > 5
    assert [
        name for name in importers if {"torch", "time", "megatron"} & {each.split(".")[0] for each in IMPORTS[name]}
    ] == []


def test_threads_that_ask_something_of_a_device_spoil_no_capture() -> None:
    """As `DeviceThread` does: a plain one, in a module that uses torch.cuda, would break a CUDA graph beside it."""
    ours = {name: ast.unparse(tree) for name, tree in modules() if not name.startswith(f"{PACKAGE}.emulation")}
    assert sum("DeviceThread(" in text for text in ours.values()) > 8
    plain = {name for name, text in ours.items() if "threading.Thread(" in text and "torch.cuda" in text}
    assert plain == {f"{PACKAGE}.transport.gpu.cuda_device"} & plain


def _is_sentence(node: ast.expr) -> bool:
    """Whether an expression is the text of an exception, or a field that holds one for people."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "cause", "silence", "why")
    return isinstance(node, ast.Attribute) and node.attr in ("reason", "cause", "detail", "remedy")


def _reads(node: ast.AST) -> Iterator[ast.expr]:
    """The texts that an expression looks for something in; to take words apart, or the first line, is no reading."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield from node.comparators
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        asked = [each.value for each in node.args if isinstance(each, ast.Constant)]
        if node.func.attr in ("startswith", "endswith", "split", "partition", "removeprefix") and asked not in (
            [],
            ["\n"],
        ):
            yield node.func.value
        elif node.func.attr in ("search", "match", "fullmatch", "findall", "sub"):
            yield from node.args


def test_no_code_reads_a_sentence_back() -> None:
    """But for those of other libraries, in one module: what code needs to know is a field or a type."""
    readers = {name for name, tree in modules() for node in ast.walk(tree) if any(map(_is_sentence, _reads(node)))}
    assert readers == {f"{PACKAGE}.foreign_errors"}
