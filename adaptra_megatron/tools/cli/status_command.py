# SPDX-License-Identifier: Apache-2.0
"""`adaptra status`: a running job in a few lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from adaptra_megatron.telemetry.events import event_log
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.report.status_page import Status, status_of

_DESCRIPTION = """\
Say in a few lines how a job does: iteration and speed, slow links and stages, ranks that have died and what that
costs, routes, and what to do.

RUN is the directory that the job was given by --adaptra-trace-dir, with or without traces of all iterations.

Exit status: 0 where nothing is to do, 3 where something is slow, dead, silent or failed, 2 for what cannot be read.
"""
SOMETHING_TO_DO = 3
"""Exit status: of itself no error, but somebody should look."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "status",
        help="say how a running job does, and what to do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.add_argument(
        "--follow", action="store_true", help="say it again and again, until the run has ended or is silent"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON (each time) instead of text")
    parser.add_argument(
        "--interval-s", type=seconds, default=5.0, metavar="SECONDS", help="from one time to the next (default: 5)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    while True:
        status = _status(options.directory)
        if options.json:
            text = json.dumps({**asdict(status), "to_do": status.to_do or ["nothing"]})
        else:
            text = "\n".join(status.lines())
        clear = "\033[H\033[2J" if options.follow and not options.json and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not options.follow or status.over:
            return 0 if status.healthy else SOMETHING_TO_DO
        time.sleep(options.interval_s)
        if not options.json and not clear:
            print()


def _status(directory: Path) -> Status:
    """Return what the log says now, as far as it can be read."""
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
