# SPDX-License-Identifier: Apache-2.0
"""Print tables on stdout and progress on stderr, by rich if it is installed."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adaptra_megatron.schedule.jobs.job_simulation import Progress


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cycle collector: a schedule is hundreds of thousands of tuples without cycles, and to look for these
    takes longer than to make them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_PERIOD_S = 2.0
"""Seconds between two lines of progress."""


def add_progress_option(parser: argparse.ArgumentParser) -> None:
    """Add `--progress` and `--no-progress`."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show progress on stderr (default: if stderr is a terminal)",
    )


@contextmanager
def shown_progress(wanted: bool | None) -> Iterator[Progress | None]:
    """Yield a function that shows progress; None if none is shown. `wanted`: by default, if stderr is a terminal."""
    terminal = sys.stderr.isatty()
    if not (terminal if wanted is None else wanted):
        yield None
        return
    if not terminal:
        yield _Lines()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield _Lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, object] = {}

        def tell(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing)
            bar.update(tasks[doing], completed=done, total=total)  # type: ignore[arg-type]

        yield tell


class _Lines:
    """Progress as a line every few seconds, so that a log stays short; none for quick work."""

    def __init__(self) -> None:
        self._begun_s = self._printed_s = time.monotonic()

    def __call__(self, doing: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._printed_s < _PERIOD_S:
            return
        self._printed_s = now_s
        print(f"{doing}: {done} of {total} ({now_s - self._begun_s:.0f} s)", file=sys.stderr, flush=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print right-aligned columns under `headings`. Nothing is cut off: if rich's table is too wide, it is plain."""
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
