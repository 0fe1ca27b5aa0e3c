# SPDX-License-Identifier: Apache-2.0
"""Tables on stdout: rich's where it is installed, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Right-aligned columns under `headings`. None is cut off: where rich's do not fit, they are plain."""
    try:
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table
    except ImportError:
        _print_plain(headings, rows)
        return
    console, table = Console(), Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    if Measurement.get(console, console.options.update(max_width=1 << 16), table).minimum > console.width:
        _print_plain(headings, rows)
    else:
        console.print(table)


def _print_plain(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
