# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, from room to room and from module to module; a file name and a public class name are used
once; Megatron is imported in few places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "adaptra_megatron"
ROOT = Path(__file__).parents[1]
FLOORS = (
    {"common", "routable_data"},
    {"schedule"},
    {"telemetry"},
    {"transport"},
    {"gradsync"},
    {"config"},
    {"control"},
    {"elastic"},
    {"megatron"},
    {"engine", "patches"},
    {"auto", "__main__"},
    {"tools"},
)
"""From the ground up: what is on a floor imports from its own and from those below. config stands on what it names the
choices of: orders, transports and ways of summing gradients."""
MEGATRON = {f"{PACKAGE}.patches", f"{PACKAGE}.megatron", "testing"}
"""What may import Megatron."""


def files() -> Iterator[tuple[str, Path]]:
    for folder in (PACKAGE, "patches", "testing"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield (f"{PACKAGE}.{name}" if folder == "patches" else name), file


def only_typing(tree: ast.Module) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {below for block in blocks for statement in block.body for below in ast.walk(statement)}


def imported(tree: ast.Module, *, typing: bool) -> Iterator[str]:
    """Names that are imported anywhere, in functions too; those for type checkers alone only with `typing`."""
    left_out = set() if typing else only_typing(tree)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = dict(files())
TREES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}
IMPORTS = {name: set(imported(tree, typing=True)) for name, tree in TREES.items()}


def module_of(name: str) -> str:
    """The module that has a name, or is it; "" for what is none of ours."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name


def room(name: str) -> str | None:
    """The part of the package that a module is in; None for others, and for the package itself."""
    return name.removeprefix(f"{PACKAGE}.").partition(".")[0] if name.startswith(f"{PACKAGE}.") else None


def test_floors_import_from_those_below() -> None:
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    upwards = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if (here := room(name)) in floor and (there := room(other)) in floor and floor[str(here)] < floor[str(there)]
    ]
    assert not upwards
    rooms = {
        file.stem for file in (ROOT / PACKAGE).iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()
    }
    assert rooms | {"patches"} == set(floor) | {"__init__"}, "a room without a floor, or a floor without a room"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Neither as it is imported nor in functions."""
    graph = {
        name: {module_of(other) for other in imported(tree, typing=False)} - {"", name, PACKAGE}
        for name, tree in TREES.items()
    }
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()


def test_the_package_imports_nothing_of_testing() -> None:
    ours = [name for name in IMPORTS if room(name) is not None]
    assert [name for name in ours for other in IMPORTS[name] if other.split(".")[0] == "testing"] == []


def test_a_file_name_is_used_once() -> None:
    names = [file.stem for name, file in FILES.items() if name.startswith(f"{PACKAGE}.")]
    twice = {name for name in names if names.count(name) > 1 and not name.startswith("__")}
    assert twice == set()


def test_a_public_class_name_is_used_once() -> None:
    homes: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if room(name) is not None and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_megatron_is_imported_where_it_may_be() -> None:
    importers = {name for name, others in IMPORTS.items() if any(other.split(".")[0] == "megatron" for other in others)}
    assert any(name.startswith(f"{PACKAGE}.megatron.") for name in importers)
    assert {name for name in importers if not any(f"{name}.".startswith(f"{each}.") for each in MEGATRON)} == set()


@pytest.mark.parametrize("pure", ["schedule", "control.detector"])
def test_what_is_pure_imports_neither_torch_nor_a_clock(pure: str) -> None:
    importers = [name for name in IMPORTS if name.startswith(f"{PACKAGE}.{pure}")]
    assert len(importers) > 5
    assert [
        name for name in importers if {"torch", "time", "megatron"} & {each.split(".")[0] for each in IMPORTS[name]}
    ] == []


def test_threads_that_ask_something_of_a_device_spoil_no_capture() -> None:
    """As `DeviceThread` does: a plain one, in a module that uses torch.cuda, would break a CUDA graph's capture."""
    ours = {name: ast.unparse(tree) for name, tree in TREES.items() if room(name) is not None}
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
    readers = {name for name, tree in TREES.items() for node in ast.walk(tree) if any(map(_is_sentence, _reads(node)))}
    assert readers == {f"{PACKAGE}.common.foreign_errors"}


PRIVATE_WORDS = {
    *("told", "hear", "heard", "beside", "bury", "buries", "buried", "heir", "heirs"),
    *("outlive", "outlives", "outlived", "outliving", "whoever", "stranger", "strangers"),
    *("newcomer", "newcomers", "heed", "heeded"),
}
"""Words for which docs/glossary.md has the field's: notified, received, sidecar, recover, peer ..."""


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names of functions, classes, constants, fields and methods."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from public_names(node.body)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def private_words(name: str) -> set[str]:
    """Words of a name in snake_case, CamelCase or CAPITALS that are our own."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)} & PRIVATE_WORDS


def test_public_names_use_the_words_of_the_field() -> None:
    assert private_words("HeardBye") == private_words("on_heard") == private_words("HEARD_S") == {"heard"}
    named = {f"{module}.{name}": name for module, tree in TREES.items() for name in public_names(tree.body)}
    named |= {module: module for module in TREES}
    found = {place for place, name in named.items() if not name.startswith("_") and private_words(name)}
    assert len(named) > 3000
    assert found == set(), "docs/glossary.md has the field's words"
