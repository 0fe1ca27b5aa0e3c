# SPDX-License-Identifier: Apache-2.0
"""`adaptra report`: a run explained on one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adaptra_megatron.telemetry.tracing.trace import TraceError
from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.progress import add_progress_option, shown_progress
from adaptra_megatron.tools.recordings.run_record import read_run
from adaptra_megatron.tools.report.report_page import MOST_TIMELINES, MissingIterationError, report_page

_DESCRIPTION = """\
Explain a run on one HTML page: what happened, where the time went, which links were slow, what plans gained.

RUN is the directory that the run was given by --adaptra-trace-dir; of a run on several hosts, a directory with the
files of all of them. The page needs no network and no other file. It is made of what is there: what is missing or
damaged is said on top of it and on stderr.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "report",
        help="explain a run on one HTML page",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory with the traces of the run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page to write (default: report.html in RUN)"
    )
    parser.add_argument(
        "--iterations",
        type=_iterations,
        metavar="8,12,40",
        help="iterations whose timelines to draw, in the page's numbers, which are Megatron's where the log tells them "
        "(default: a typical one of each part of the run)",
    )
    parser.add_argument("--title", default="", help="name of the run on the page (default: the directory's)")
    parser.add_argument(
        "--strict", action="store_true", help="write no page, and exit with 2, if anything is missing or damaged"
    )
    add_progress_option(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        with shown_progress(options.progress) as progress:
            run = read_run(options.directory, progress)
            if options.strict and run.missing:
                raise InputError("; ".join(run.missing))
            page = report_page(run, iterations=options.iterations, title=options.title, progress=progress)
    except (TraceError, MissingIterationError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename or options.directory}: {error.strerror or error}") from error
    output = options.output or options.directory / "report.html"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}; name another --output") from error
    for sentence in run.missing:
        print(f"missing: {sentence}", file=sys.stderr)
    print(output)


def _iterations(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of iterations such as 8,12,40")
    numbers = sorted({int(part) for part in parts})
    if len(numbers) > MOST_TIMELINES:
        raise argparse.ArgumentTypeError(f"{len(numbers)} iterations are too many for a page: {MOST_TIMELINES} at most")
    return numbers
