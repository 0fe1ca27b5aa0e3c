# SPDX-License-Identifier: Apache-2.0
"""Counts lines of modules: of code, and of docstrings."""

from __future__ import annotations

import ast
from typing import NamedTuple


class Lines(NamedTuple):
    """Lines of some modules; `code`: neither blank, comment nor docstring."""

    modules: int
    lines: int
    code: int
    docstrings: int


def lines_of(text: str) -> Lines:
    """Count the lines of one module."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(statement.lineno, statement.end_lineno + 1))
    lines = text.splitlines()
    code = [line for number, line in enumerate(lines, 1) if number not in docstrings and line.strip()]
    return Lines(1, len(lines), sum(not line.lstrip().startswith("#") for line in code), len(docstrings))
