# SPDX-License-Identifier: Apache-2.0
"""Messages that docs/messages.md explains are those that the code has."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from support.processes import REPOSITORY

BETWEEN = re.compile(r"\.\.\.|\S*[A-Z]{2}\S*|\b[A-Z]\b|\S*\d\S*|--adaptra[\w-]*|[\"'(),:;]")
"""In a page's message: what stands for something else, and where one part of a message ends and another begins."""
OTHERS = ("unrecognized arguments", "No module named", "Too many open files")
"""What Python and the system say."""


@functools.cache
def texts() -> str:
    """All string constants of the package, in one piece each, however they are written down; no docstrings."""
    found: list[str] = []
    for folder in ("adaptra_megatron", "patches"):
        for source in (REPOSITORY / folder).rglob("*.py"):
            if not {"local_ranks", "transport_bench"} & set(source.parts):
                found += constants(ast.parse(source.read_text()))
    for source in (REPOSITORY / "csrc").rglob("*.?pp"):
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", source.read_text()))
    return "\n".join(" ".join(text.split()) for text in found)


def constants(tree: ast.Module) -> Iterator[str]:
    """Strings that are used for something."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def explained(page: Path) -> Iterator[str]:
    """Messages in the first columns of tables about messages."""
    for table in re.findall(r"^\| message .*\n\|[-| ]+\n((?:\|.*\n)*)", page.read_text(), re.MULTILINE):
        for row in table.splitlines():
            yield from re.findall(r"`([^`]+)`", row.split(" | ")[0])


def test_messages_that_are_explained_are_in_the_code() -> None:
    messages = list(explained(REPOSITORY / "docs" / "messages.md"))
    assert len(messages) > 120
    unknown = [message for message in messages if not is_in_the_code(message)]
    assert not unknown


def test_messages_that_the_code_lacks_are_named() -> None:
    assert is_in_the_code("the delegate ended by signal SIGKILL")
    assert is_in_the_code("stage N has closed its end")
    assert not is_in_the_code("stage N has opened its end")
    assert not is_in_the_code("the delegate has left for lunch")


def is_in_the_code(message: str) -> bool:
    """Return whether the code has the words between placeholders, in order and in runs: texts are put into others."""
    for said_by_others in OTHERS:
        message = message.replace(said_by_others, "")
    return all(covered(piece.split()) for piece in BETWEEN.split(message))


def covered(words: list[str]) -> bool:
    """Return whether `words` are runs of words that texts have, and at most one of the runs is a single word."""
    first = single = 0
    while first < len(words):
        lengths = range(len(words) - first, 0, -1)
        longest = next((length for length in lengths if " ".join(words[first : first + length]) in texts()), 0)
        single += longest < 2
        if not longest or single > 1:
            return False
        first += longest
    return True
