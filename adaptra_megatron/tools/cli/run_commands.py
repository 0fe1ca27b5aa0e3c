# SPDX-License-Identifier: Apache-2.0
"""Define the commands on a run's directory: `adaptra report`, the run explained on one HTML page; `adaptra status`, the
state of a running job; `adaptra trace` and `adaptra policy`, requests to it; `adaptra analyze`, what is slow and what
each remedy would save."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from adaptra_megatron.telemetry import event_log
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.event_wording import event_text
from adaptra_megatron.telemetry.events import PlanSwitched, PolicyChanged, StampedEvent
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.telemetry.trace_requests import (
    POLICIES,
    RequestError,
    ask_for_policy,
    parse_request,
    request_directory,
)
from adaptra_megatron.tools.cli.planning.inputs import InputError, above_zero, count, seconds, write_page
from adaptra_megatron.tools.cli.terminal import add_progress_option, shown_progress
from adaptra_megatron.tools.recordings.run_files import renumbered
from adaptra_megatron.tools.recordings.run_record import read_run
from adaptra_megatron.tools.report.iteration_chart import worth_a_row
from adaptra_megatron.tools.report.perfetto import Instant, merge_traces
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
    write_page(output, page, "--output")
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
"""Exit status of a job in which something needs attention; not an error."""


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


LOOK_AGAIN_S = 0.2

_TRACE = """\
Join the traces of all ranks of RUN to one file for ui.perfetto.dev.

With --request, first ask the running job for iterations: `next`, `next-5`, `last`, `last-5`, `120` or `120-125`,
as Megatron's log counts them. That is the same as `touch RUN/requests/next-5`, which any host that sees the directory
can do.
"""


def add_trace_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "trace",
        help="ask a running job for a Perfetto trace of some iterations",
        description=_TRACE,
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
    parser.set_defaults(run=_run_trace)


def _run_trace(options: argparse.Namespace) -> None:
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
    """Write the request, and remove it again if no rank reads it in time."""
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
    """Wait until the job has removed the file of a request. After `timeout_s`, remove it, and raise InputError with
    `question`, which names possible reasons. Raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    while request.exists():
        if time.monotonic() > deadline_s:
            request.unlink(missing_ok=True)
            raise InputError(f"no job has read {request} within {timeout_s:g} s: {question}")
        time.sleep(LOOK_AGAIN_S)


_POLICY = """\
Switch a running job to another policy, without a restart. All ranks of a replica switch in the same iteration, the
second one after the job has read the request, and the log says so.

  observe    Megatron's own order, on the preferred path of each link; measuring continues, and `adapt` can be
             requested later. Compare iteration times of both to see the effect of adaptra
  off        the same, and nothing is decided: no rank waits for a decision, or uses the job's store in an iteration.
             It lasts for the rest of the run, because no rank reads requests any longer
  adapt      plans again, from the beginning; only for jobs that were started with it

Both paths of a link stay, so that one that fails is still replaced by the other.

RUN is the directory that the job was given by --adaptra-trace-dir, as the host of rank 0 sees it.
"""


def add_policy_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policy` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "policy",
        help="have a running job observe only, or adapt again",
        description=_POLICY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.add_argument("policy", choices=POLICIES, help="the new policy")
    parser.add_argument(
        "--timeout-s", type=seconds, default=120.0, metavar="SECONDS", help="longest wait for the job (default: 120)"
    )
    parser.set_defaults(run=_run_policy)


def _run_policy(options: argparse.Namespace) -> None:
    directory, policy = options.directory, options.policy
    deadline_s = time.monotonic() + options.timeout_s
    try:
        before = len(_changes(read_events(directory, lambda _problem: None)))
        if not any(directory.glob("events-*.jsonl")):
            raise InputError(f"no events-*.jsonl in {directory}: name the --adaptra-trace-dir of a job that runs")
        request = ask_for_policy(directory, policy)
        wait_until_read(request, options.timeout_s, "is it running, not yet at its end, and not off already?")
        print(_answer(directory, policy, before, deadline_s))
    except OSError as error:
        raise InputError(f"{error.filename or directory}: {error.strerror or error}") from error


def _answer(directory: Path, policy: str, before: int, deadline_s: float) -> str:
    """Return the job's answer to a request, from its log. `before`: number of policy changes before it. Raises
    OSError."""
    while True:
        events = renumbered(read_events(directory, lambda _problem: None))
        for found in _changes(events)[before:]:
            assert isinstance(found.event, PolicyChanged)
            for later in events:
                switch = later.event
                if (
                    isinstance(switch, PlanSwitched)
                    and later.stamp.rank == found.stamp.rank
                    and switch.number >= found.event.number
                ):
                    return f"policy {found.event.after} from iteration {later.stamp.iteration} on"
        if time.monotonic() > deadline_s:
            raise InputError(
                f"the job has read the request and goes by no other policy yet: it may run {policy} already, be within "
                "a long iteration, or have refused it, which its log says"
            )
        time.sleep(LOOK_AGAIN_S)


def _changes(events: list[StampedEvent]) -> list[StampedEvent]:
    return [found for found in events if isinstance(found.event, PolicyChanged)]


_ANALYZE = """\
Replay a recorded job: what is slow, since when, what it costs, and what each remedy would bring.

TRACE is an op-level trace in Parquet, the directory that a run was given by --adaptra-trace-dir, a Chrome trace whose
forwards and backwards are named, or a directory of such traces, one per rank. Exit status 1: the replay does not
explain the recording, so causes are unknown; 2: it cannot be read.
"""


def add_analyze_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `analyze` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "analyze",
        help="say what is slow in a recorded job, and what would help",
        description=_ANALYZE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file or directory with what was recorded")
    parser.add_argument("--steps", type=_steps, metavar="8,12,20-30", help="steps to look at (default: all)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no other file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--stages", type=count, metavar="COUNT", help="pipeline size, if the traces of many ranks lack it"
    )
    parser.add_argument(
        "--replicas", type=count, metavar="COUNT", help="number of replicas, if ranks share stages and traces lack it"
    )
    parser.add_argument(
        "--activation-gib",
        type=_gib,
        metavar="GIB",
        help="memory of one micro-batch's activations on a stage: remedies that take memory say how much",
    )
    add_progress_option(parser)
    parser.set_defaults(run=_run_analyze)


def _run_analyze(options: argparse.Namespace) -> int:
    from adaptra_megatron.tools.cli.analyze_recording import run  # numpy, which other commands do without

    return run(options)


def _steps(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and len(first) < 10) or (dash and not (last.isdecimal() and len(last) < 10)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of steps such as 8,12,20-30")
        if int(last or first) - int(first) > 1_000_000:
            raise argparse.ArgumentTypeError(f"{part!r} is too long a range: 1000000 steps at most")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _gib(text: str) -> float:
    return above_zero(text, "no number of GiB")
