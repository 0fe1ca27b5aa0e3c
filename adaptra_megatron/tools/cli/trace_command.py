# SPDX-License-Identifier: Apache-2.0
"""`adaptra trace`: asks a running job for some iterations, and makes a Perfetto trace of what there is."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from adaptra_megatron.telemetry.events.event_log import read_events
from adaptra_megatron.telemetry.events.event_wording import event_text
from adaptra_megatron.telemetry.tracing.trace import TraceError
from adaptra_megatron.telemetry.tracing.trace_requests import RequestError, parse_request, request_directory
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.report.event_rows import worth_a_row
from adaptra_megatron.tools.traces.perfetto import Instant, merge_traces

LOOK_AGAIN_S = 0.2

_DESCRIPTION = """\
Join the traces of all ranks of RUN to one file for ui.perfetto.dev.

With --request, first ask the job that runs for iterations: `next`, `next-5`, `last`, `last-5`, `120` or `120-125`,
as Megatron's log counts them. That is the same as `touch RUN/requests/next-5`, which any host that sees the directory
can do.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "trace",
        help="ask a running job for a Perfetto trace of some iterations",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.add_argument("--request", metavar="WHICH", help="iterations to trace; wait until the job has read it")
    parser.add_argument(
        "--timeout-s", type=seconds, default=60.0, metavar="SECONDS", help="longest wait for the job (default: 60)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: trace.json.gz in RUN; .gz compresses; .pftrace is Perfetto's own format (needs its package)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.request is not None:
        _ask(options.directory, options.request, options.timeout_s)
        print("the job has read the request: once the iterations are over, run `adaptra trace` without --request")
        return
    try:
        events = [found for found in read_events(options.directory, lambda _problem: None) if worth_a_row(found)]
        instants = [Instant(found.stamp.monotonic_s, *event_text(found.event)) for found in events]
        offsets_s = [found.stamp.wall_s - found.stamp.monotonic_s for found in events]
        offset_s = median(offsets_s) if offsets_s else None
        print(merge_traces(options.directory, options.output, instants=instants, wall_clock_offset_s=offset_s))
    except TraceError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{error.filename or options.directory}: {error.strerror or error}") from error


def _ask(directory: Path, name: str, timeout_s: float) -> None:
    """Put the request where the job looks, and take it back if no rank reads it in time."""
    try:
        parse_request(name, running=1)
        request = request_directory(directory) / name
        request.touch()
    except RequestError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(
            f"cannot write {request}: {error.strerror}; name the --adaptra-trace-dir of a job that was started with "
            "traces on demand"
        ) from error
    wait_until_read(request, timeout_s, "is it running, and not yet at its end?")


def wait_until_read(request: Path, timeout_s: float, question: str) -> None:
    """Wait until the job has taken the file of a request away. Takes it back, and raises InputError with the `question`
    that this leaves, where that lasts longer than `timeout_s`. Raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    while request.exists():
        if time.monotonic() > deadline_s:
            request.unlink(missing_ok=True)
            raise InputError(f"no job has read {request} within {timeout_s:g} s: {question}")
        time.sleep(LOOK_AGAIN_S)
