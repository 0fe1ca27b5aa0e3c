# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra trace` and `adaptra policy`: request traces of some iterations, or another policy, from a running
job."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

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
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.recordings.run_files import renumbered
from adaptra_megatron.tools.report.iteration_chart import worth_a_row
from adaptra_megatron.tools.report.perfetto import Instant, merge_traces

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
