# SPDX-License-Identifier: Apache-2.0
"""`adaptra bench`: what is measured on this machine."""

from __future__ import annotations

import argparse

from adaptra_megatron.tools.cli import bench_transport


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the commands of `adaptra`."""
    bench = commands.add_parser(
        "bench",
        help="measure the transports",
        description="Measure the transports of the host path.",
    )
    kinds = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    bench_transport.add_command(kinds)
