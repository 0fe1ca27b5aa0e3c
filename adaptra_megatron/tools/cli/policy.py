# SPDX-License-Identifier: Apache-2.0
"""`adaptra policy`: has a running job go by another policy."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from adaptra_megatron.telemetry.events.event_log import read_events
from adaptra_megatron.telemetry.events.events import PlanSwitched, PolicyChanged, StampedEvent
from adaptra_megatron.telemetry.tracing.trace_requests import POLICIES, ask_for_policy
from adaptra_megatron.tools.cli.planning.inputs import InputError, seconds
from adaptra_megatron.tools.cli.trace_command import LOOK_AGAIN_S, wait_until_read
from adaptra_megatron.tools.recordings.numbering import renumbered

_DESCRIPTION = """\
Have a job that runs go by another policy, without a restart. It begins in the same iteration on all ranks of a replica,
the next but one after the job has read it, and the log says so.

  observe  Megatron's own order, by the preferred path of each link; measuring goes on, and `adapt` can be asked for
           later. Compare iteration times of both: "is it us?"
  off      the same, and nothing is decided any more: no rank waits for a decision, or talks to the job's store in an
           iteration. For the rest of the run, for nobody listens any more
  adapt    plans again, from the beginning; for jobs that were started with it

Both paths of a link stay, so that one that fails is still replaced by the other.

RUN is the directory that the job was given by --adaptra-trace-dir, as the host of rank 0 sees it.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policy` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "policy",
        help="have a running job observe only, or adapt again",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's --adaptra-trace-dir")
    parser.add_argument("policy", choices=POLICIES, help="what to go by")
    parser.add_argument(
        "--timeout-s", type=seconds, default=120.0, metavar="SECONDS", help="longest wait for the job (default: 120)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
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
    """Return what the job's log says to the request. `before`: number of changes in it by then. Raises OSError."""
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
