# SPDX-License-Identifier: Apache-2.0
"""Draws the orders of a comparison: on a page, as a trace for Perfetto, as text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.tracing.trace import TraceError
from adaptra_megatron.tools.cli.planning.comparison import Comparison
from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.planning.picture import stage_picture
from adaptra_megatron.tools.report.simulated import Drawn, simulated_traces
from adaptra_megatron.tools.traces.perfetto import chrome_trace, write_trace


def add_drawing_options(parser: argparse.ArgumentParser) -> None:
    """Add `--html`, `--trace` and `--timeline`."""
    group = parser.add_argument_group("pictures", "of one set of costs; of several replicas, the slowest is drawn")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines that needs no other file")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev (.gz compresses; .pftrace: its format)",
    )
    group.add_argument("--timeline", action="store_true", help="draw the plan as text, a letter per action")


def asks_for_drawings(options: argparse.Namespace) -> bool:
    """Return whether any is wanted."""
    return options.html is not None or options.trace is not None or options.timeline


def draw(comparison: Comparison, name: str, options: argparse.Namespace) -> None:
    """Write and print what `options` ask for. Raises InputError where that cannot be written."""
    if not asks_for_drawings(options):
        return
    if (options.html or options.trace) and comparison.job.base.custom_placement is not None:
        raise InputError("--html and --trace draw Megatron's placement alone: --timeline draws others, too")
    drawn = _drawn(comparison)
    if options.html is not None:
        from adaptra_megatron.tools.report.plan_page import plan_page  # Jinja, which little else needs

        planned, healthy = comparison["planned"].makespan_s, comparison.healthy_s
        headline = f"{planned:.4g} s planned, {healthy:.4g} s healthy"
        page = plan_page(name, headline, drawn, rows=comparison.cells, note=comparison.note)
        _write(options.html, lambda path: path.write_text(page, encoding="utf-8"))
    if options.trace is not None:
        documents = [
            chrome_trace(simulated_traces(each.simulation), label=each.title, run=run) for run, each in enumerate(drawn)
        ]
        _write(options.trace, lambda path: write_trace(path, *documents))
    if options.timeline and not options.json:
        axis_s = max(each.simulation.makespan_s for each in drawn)
        for each in drawn:
            print(f"{each.title}, {each.simulation.makespan_s:.4g} s")
            print("\n".join(stage_picture(each.simulation, axis_s)))


def _drawn(comparison: Comparison) -> list[Drawn]:
    """The orders whose actions are known, in the replica that is the slowest with them."""
    found = []
    for row in comparison.rows:
        if row.schedule is None or row.simulation is None or row.name == "healthy":
            continue
        costs = row.simulation.job.groups[row.simulation.slowest].costs
        found.append(Drawn(row.name, simulate(row.schedule, costs, blocking=row.blocking), costs))
    return found


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    except TraceError as error:
        raise InputError(str(error)) from error
