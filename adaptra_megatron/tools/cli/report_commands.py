# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra report`, a run explained on one HTML page, and `adaptra status`, the state of a running job."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from adaptra_megatron.telemetry import event_log
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.cli.terminal import add_progress_option, shown_progress
from adaptra_megatron.tools.recordings.run_record import read_run
from adaptra_megatron.tools.report.report_page import MOST_TIMELINES, MissingIterationError, report_page
from adaptra_megatron.tools.report.status_page import Status, status_of

_REPORT = """\
Explain a run on one HTML page: what happened, where the time went, which links were slow, what plans gained.

RUN is the directory that the run was given by --adaptra-trace-dir; of a run on several hosts, a directory with the
files of all of them. The page needs no network and no other file. It uses all files that can be read;
missing or damaged ones are named at its top and on stderr.
"""


def add_report_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "report",
        help="explain a run on one HTML page",
        description=_REPORT,
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
        help="iterations whose timelines to draw, in the page's numbers, which are Megatron's if the log has them "
        "(default: a typical one of each part of the run)",
    )
    parser.add_argument("--title", default="", help="name of the run on the page (default: the directory's)")
    parser.add_argument(
        "--strict", action="store_true", help="write no page, and exit with 2, if anything is missing or damaged"
    )
    add_progress_option(parser)
    parser.set_defaults(run=_run_report)


def _run_report(options: argparse.Namespace) -> None:
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


_STATUS = """\
Describe the state of a job in a few lines: iteration and speed, slow links and stages, failed ranks and their cost,
routes, and what to do.

RUN is the directory that the job was given by --adaptra-trace-dir, with or without traces of all iterations.

Exit status: 0 if there is nothing to do, 3 if something is slow, dead, silent or failed, 2 if the run cannot be read.
"""
SOMETHING_TO_DO = 3
"""Exit status that is no error, but means that somebody should look."""


def add_status_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "status",
        help="describe the state of a running job, and what to do",
        description=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.add_argument("--follow", action="store_true", help="repeat until the run has ended or is silent")
    parser.add_argument("--json", action="store_true", help="one line of JSON (each time) instead of text")
    parser.add_argument(
        "--interval-s", type=seconds, default=5.0, metavar="SECONDS", help="between repetitions (default: 5)"
    )
    parser.set_defaults(run=_run_status)


def _run_status(options: argparse.Namespace) -> int:
    while True:
        status = _status(options.directory)
        text = json.dumps(status.to_json()) if options.json else "\n".join(status.lines())
        clear = "\033[H\033[2J" if options.follow and not options.json and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not options.follow or status.over:
            return 0 if status.healthy else SOMETHING_TO_DO
        time.sleep(options.interval_s)
        if not options.json and not clear:
            print()


def _status(directory: Path) -> Status:
    """Return the state in the log, as far as it can be read."""
    damage: list[event_log.Damage] = []
    try:
        events = event_log.read_events(directory, damage.append)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or directory}: {error.strerror or error}") from error
    if not events and damage:
        raise InputError(str(damage[0]))
    if not events:
        raise InputError(f"no {event_log.FILE_PATTERN} in {directory}: name the --adaptra-trace-dir of a job")
    status = status_of(events, time.time())
    if not damage:
        return status
    lines = f"{len(damage)} line{'s' if len(damage) > 1 else ''} of the log cannot be read: {damage[0]}"
    return replace(status, faults=[*status.faults, lines])
