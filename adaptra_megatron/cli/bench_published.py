# SPDX-License-Identifier: Apache-2.0
"""`adaptra bench published`: every published case of training over slow links, ours beside what was published."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from adaptra_megatron.cli.directories import make_directory
from adaptra_megatron.cli.inputs import InputError
from adaptra_megatron.emulation.launch import LaunchError
from adaptra_megatron.emulation.published import plots, real_report, report
from adaptra_megatron.emulation.published.cases import Case, UnknownCaseError, load_cases, select_cases
from adaptra_megatron.emulation.published.real import RealCase, run_case
from adaptra_megatron.emulation.published.simulated import SimulatedCase, simulate_case

REAL_CASES = ("single/7B/*", "single/14B/*")
"""What --real runs where nothing is said: 8 jobs of about a minute each."""

_DESCRIPTION = """\
Rerun every published case of training over slow links: stock 1F1B and interleaved, zero bubble (ZB-H1, ZB-H2), host
path only, planned for the delay, and online; beside the published times, and the lower bound.

Without more, all cases are simulated from the published times of their stages, in seconds. With --real the chosen cases
also run in real processes on this machine, with emulated compute and links: about a minute each.
"""

_Row = TypeVar("_Row")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `published` to what `adaptra bench` measures."""
    parser = commands.add_parser(
        "published",
        help="every published case of slow links, beside the published figures",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME,...",
        help="shell patterns of case names, such as 'single/*/60ms'; default: all, with --real "
        f"{' and '.join(REAL_CASES)}; see --list",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and leave")
    parser.add_argument("--real", action="store_true", help="also run the cases in real processes on this machine")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write published.md, published.json and, with matplotlib, plots"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    patterns = options.cases or (REAL_CASES if options.real else ("*",))
    try:
        cases = select_cases(load_cases(), patterns)
    except UnknownCaseError as error:
        raise InputError(f"{error}; see adaptra bench published --list") from error
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if options.out is not None:
        make_directory(options.out, "--out")  # before minutes of running, not after
    simulated = _each("simulating", cases, simulate_case)
    try:
        real = _run_real(cases) if options.real else []
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    _show(simulated, real, options)
    return 0


def _run_real(cases: Sequence[Case]) -> list[RealCase]:
    from adaptra_megatron.emulation.fork_server import ForkServer

    with ForkServer() as server:
        return _each("running", cases, lambda case: run_case(case, server))


def _each(doing: str, cases: Sequence[Case], work: Callable[[Case], _Row]) -> list[_Row]:
    """One row per case, with progress on a terminal."""
    rows = []
    with _progress(doing, len(cases)) as advance:
        for case in cases:
            advance(case.name)
            rows.append(work(case))
    return rows


@contextlib.contextmanager
def _progress(doing: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to be called with the name of each case as its turn comes. On stderr: stdout is for the results."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield advance


def _show(simulated: Sequence[SimulatedCase], real: Sequence[RealCase], options: argparse.Namespace) -> None:
    text = report.markdown(simulated)
    if real:
        text += "\n" + real_report.markdown(real)
    document = report.dump_json({"simulated": report.as_json(simulated), "real": [each.to_json() for each in real]})
    print(document if options.json else text, end="")
    if options.out is None:
        return
    try:
        pictures = _draw(simulated, real, options.out)
        (options.out / "published.md").write_text(f"# Published cases\n\n{text}{pictures}", encoding="utf-8")
        (options.out / "published.json").write_text(document, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {options.out}: {error.strerror or error}") from error


def _draw(simulated: Sequence[SimulatedCase], real: Sequence[RealCase], directory: Path) -> str:
    """Draw into `directory`; what the Markdown says of it."""
    try:
        plots.draw(simulated, directory / "published.png")
        if real:
            plots.draw_real(real, directory / "published-real.png")
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return ""
    text = "\n![Simulated and published times of every case](published.png)\n"
    return text + ("\n![Times of real processes](published-real.png)\n" if real else "")
