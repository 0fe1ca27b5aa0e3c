# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra analyze`: what is slow in a recorded job, since when, at what cost, and what each remedy would
save."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from adaptra_megatron.tools.cli.planning.inputs import count
from adaptra_megatron.tools.cli.terminal import add_progress_option

_DESCRIPTION = """\
Replay a recorded job: what is slow, since when, what it costs, and what each remedy would bring.

TRACE is an op-level trace in Parquet, the directory that a run was given by --adaptra-trace-dir, a Chrome trace whose
forwards and backwards are named, or a directory of such traces, one per rank. Exit status 1: the replay does not
explain the recording, so causes are unknown; 2: it cannot be read.
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
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB above 0")
    return found
