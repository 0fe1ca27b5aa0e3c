# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra bench`: measure the transports of the host path on this machine."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError
from adaptra_megatron.tools.local_ranks.transport_bench import (
    GIBIBYTE,
    KIBIBYTE,
    MEBIBYTE,
    MOST_NBYTES,
    RANKS,
    TRANSPORTS,
    BenchReport,
    BenchRequest,
    draw,
    markdown,
    run_on_this_host,
)
from adaptra_megatron.transport.host_settings import usable_cores


def make_directory(directory: Path, option: str) -> None:
    """Make the directory that `option` names. Raises InputError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {directory}: {error.strerror or error}; name another {option}") from error


DEFAULTS = BenchRequest()
ROUND_TIMEOUT_S = 60.0
"""Time limit per transport, message size and round; the start has the same limit."""
_UNITS = {"": 1, "b": 1, "kib": KIBIBYTE, "mib": MEBIBYTE, "gib": GIBIBYTE}
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_DESCRIPTION = """\
Throughput and latency of the host path's transports, per message size.

Without more, between two processes of this host. Between two hosts, start it once on each as one job:

  torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST0 --no-python adaptra bench transport
  torchrun --nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr HOST0 --no-python adaptra bench transport

with the same options on both; rank 0 prints and writes what was measured.
"""


def _add_transport(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `transport` to the measurements of `adaptra bench`."""
    parser = commands.add_parser(
        "transport",
        help="throughput and latency per transport and message size",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transports", type=_transports, default=DEFAULTS.transports, metavar=",".join(TRANSPORTS))
    parser.add_argument(
        "--sizes", type=_sizes, default=DEFAULTS.sizes, metavar="4KiB,1MiB,...", help="bytes of a message"
    )
    parser.add_argument("--rounds", type=_positive, default=DEFAULTS.rounds, help="repetitions; medians are reported")
    parser.add_argument("--lanes", type=_lanes, default=DEFAULTS.lanes, help="TCP connections per link, for iperf3 too")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write transport.md, transport.json and, with matplotlib, a plot"
    )
    parser.set_defaults(run=_run)


def _lanes(text: str) -> int:
    lanes, cores = _positive(text), usable_cores()
    if lanes > cores:
        raise argparse.ArgumentTypeError(f"no link has {lanes} connections on {cores} cores: give at most {cores}")
    return lanes


def _run(options: argparse.Namespace) -> int:
    if find_spec("torch") is None:  # before ranks are started, which would say it at length
        raise ModuleNotFoundError(name="torch")
    if options.output is not None:
        make_directory(options.output, "--output")  # before minutes of measuring, not after
    request = BenchRequest(
        transports=options.transports, sizes=options.sizes, rounds=options.rounds, lanes=options.lanes
    )
    if any(name in os.environ for name in _RANK_VARIABLES):
        report = _run_as_rank(request, os.environ)
    else:
        steps = 1 + len(request.transports) * len(request.sizes) * request.rounds
        try:
            report = run_on_this_host(request, timeout_s=steps * ROUND_TIMEOUT_S)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
    if report is not None:
        _show(report, request, options.output)
    return 0


def _run_as_rank(request: BenchRequest, environment: Mapping[str, str]) -> BenchReport | None:
    """Measure as one of two ranks that torchrun or another launcher has started. Return None on the receiving rank."""
    missing = [name for name in _RANK_VARIABLES if name not in environment]
    if missing:
        raise InputError(
            f"{', '.join(missing)} is not set, but another of {', '.join(_RANK_VARIABLES)} is: "
            "set all of them for two ranks on two hosts, or none for two processes of this host"
        )
    if environment["WORLD_SIZE"] != str(RANKS):
        raise InputError(f"WORLD_SIZE is {environment['WORLD_SIZE']}: the benchmark is between {RANKS} ranks")
    from adaptra_megatron.tools.local_ranks.bench_rank import measure  # torch

    return measure(request)


def _show(report: BenchReport, request: BenchRequest, directory: Path | None) -> None:
    text = markdown(report, request)
    print(text, end="")
    if directory is None:
        return
    picture = ""
    try:
        try:
            draw(report, directory / "transport.png")
            picture = "\n![Throughput and latency over the message size](transport.png)\n"
        except ImportError as error:
            print(f"no plot: {error}")
        title = "# Transports of the host path\n\n"
        (directory / "transport.md").write_text(title + text + picture, encoding="utf-8")
        (directory / "transport.json").write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {directory}: {error.strerror or error}") from error


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(TRANSPORTS)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_size(part) for part in text.split(",")))


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+) ?([kmg]ib|b)?", text.strip(), re.IGNORECASE)
    nbytes = int(found[1]) * _UNITS[(found[2] or "").lower()] if found else 0
    if not 1 <= nbytes <= MOST_NBYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 byte to 1 GiB, such as 4096, 4KiB or 16MiB")
    return nbytes


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 64")
    return int(text)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the commands of `adaptra`."""
    bench = commands.add_parser(
        "bench",
        help="measure the transports",
        description="Measure the transports of the host path.",
    )
    kinds = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    _add_transport(kinds)
