# SPDX-License-Identifier: Apache-2.0
"""`adaptra analyze`: what is slow in a recorded job, since when, what it costs, and what each remedy would bring."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from adaptra_megatron.cli.garbage import no_cycle_collection
from adaptra_megatron.cli.planning.inputs import InputError
from adaptra_megatron.cli.progress import add_progress_option, shown_progress
from adaptra_megatron.cli.tables import print_table
from adaptra_megatron.schedule.replay.operations import ReplayError
from adaptra_megatron.telemetry.analysis.analysis import Analysis, analyse, figures
from adaptra_megatron.telemetry.analysis.page import analysis_page
from adaptra_megatron.telemetry.analysis.wording import OPTYPE_NAMES, WORTH_A_ROW, cell_name, headline, sentences, times
from adaptra_megatron.telemetry.events.event_log import EventLogError
from adaptra_megatron.telemetry.recordings.reading import read_recording
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, RecordingError
from adaptra_megatron.telemetry.report.wording import duration, link_name, percent
from adaptra_megatron.telemetry.tracing.trace import TraceError

MOST_ROWS = 8
"""Workers, replicas and links that the text shows."""

_DESCRIPTION = """\
Replay a recorded job: what is slow, since when, what it costs, and what each remedy would bring.

TRACE is an op-level trace in Parquet, the directory that a run was given by --adaptra-trace-dir, a Chrome trace whose
forwards and backwards are named, or a directory of such traces, one per rank.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `analyze` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "analyze",
        help="say what is slow in a recorded job, and what would help",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file or directory with what was recorded")
    parser.add_argument("--steps", type=_steps, metavar="8,12,20-30", help="steps to look at (default: all)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no other file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--stages", type=_count, metavar="COUNT", help="pipeline size, where traces of many ranks do not say it"
    )
    parser.add_argument(
        "--activation-gib",
        type=_gib,
        metavar="GIB",
        help="memory of one micro-batch's activations on a stage: remedies that take memory say how much",
    )
    add_progress_option(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    wanted = ALL_STEPS if options.steps is None else options.steps
    try:
        with no_cycle_collection(), shown_progress(options.progress) as progress:
            recording = read_recording(options.trace, wanted, stages=options.stages)
            analysis = analyse(recording, activation_gib=options.activation_gib, progress=progress)
    except (RecordingError, TraceError, EventLogError) as error:
        raise InputError(str(error)) from error
    except ReplayError as error:
        raise InputError(f"{options.trace}: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename or options.trace}: {error.strerror or error}") from error
    if options.html is not None:
        _write(options.html, analysis_page(analysis))
    if options.json:
        print(json.dumps(figures(analysis), allow_nan=False))
    else:
        _print_text(analysis)


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; name another --html") from error


def _print_text(analysis: Analysis) -> None:
    found, remedies = analysis.stragglers, analysis.remedies
    print(headline(analysis))
    for sentence in sentences(analysis):
        print(f"- {sentence}")
    rows = {
        "operation": [(OPTYPE_NAMES[optype], each) for optype, each in found.by_optype.items()],
        "stage": [(str(stage), each) for stage, each in found.by_stage.items()],
        "replica": [(str(replica), each) for replica, each in found.by_replica.items()],
        "worker": [(cell_name(cell), each) for cell, each in found.by_worker.items()],
        "link": [(link_name(link), each) for link, each in found.by_link.items()],
    }
    for heading, entries in rows.items():
        if max((each for _, each in entries), default=1.0) >= WORTH_A_ROW:
            print_table((heading, "slowdown"), [(name, times(each)) for name, each in entries[:MOST_ROWS]])
    if remedies.rows:
        print_table(
            ("remedy", "a step", "less", "memory"),
            [
                (
                    remedy.title,
                    duration(remedy.seconds),
                    percent(remedies.gain(remedy)),
                    _memory(remedy.extra_activations, analysis.extra_gib(remedy)),
                )
                for remedy in remedies.rows
            ],
        )


def _memory(activations: float, gib: float | None) -> str:
    if not activations:
        return ""
    text = f"{activations:g} activation{'s' if activations != 1 else ''}"
    return text if gib is None else f"{text}, {gib:.3g} GiB"


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


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of stages")
    return int(text)


def _gib(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB above 0")
    return found
