# SPDX-License-Identifier: Apache-2.0
"""Tables on stdout: rich's where it is installed, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Right-aligned columns under `headings`."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
