# SPDX-License-Identifier: Apache-2.0
"""`adaptra status`: a running job in a few lines."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from adaptra_megatron.cli.planning.inputs import InputError
from adaptra_megatron.telemetry.events import event_log
from adaptra_megatron.telemetry.report.status import status_lines
from adaptra_megatron.telemetry.tracing import trace

_DESCRIPTION = """\
Say in a few lines how a job does: iteration and speed, slow links and stages, ranks that have died and what that
costs, routes, and what to do.

RUN is the directory that the job was given by --adaptra-trace-dir, with or without traces of all iterations.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "status",
        help="say how a running job does, and what to do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    directory = options.directory
    try:
        events = event_log.read_events(directory)
        files = (path for pattern in (event_log.FILE_PATTERN, trace.FILE_PATTERN) for path in directory.glob(pattern))
        written_s = max((path.stat().st_mtime for path in files), default=0.0)
    except event_log.EventLogError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename or directory}: {error.strerror or error}") from error
    if not events:
        raise InputError(f"no {event_log.FILE_PATTERN} in {directory}: name the --adaptra-trace-dir of a job")
    print("\n".join(status_lines(events, time.time(), written_s)))
