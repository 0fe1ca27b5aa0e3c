# SPDX-License-Identifier: Apache-2.0
"""`adaptra simulate`: what a schedule takes under given costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from adaptra_megatron.cli.inputs import CLASSIC_NAMES, InputError, classic_schedule, read_costs, read_schedule
from adaptra_megatron.cli.outcome import Outcome, print_json, print_text
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate, simulate_online

_NAMES = (*CLASSIC_NAMES, "planned", "online")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "simulate", help="time a schedule", description="Time a schedule; classic ones may pass the memory cap."
    )
    parser.add_argument("costs", type=Path, metavar="COSTS.json", help="seconds of stages and links, caps")
    parser.add_argument(
        "--schedule",
        required=True,
        metavar="SCHEDULE",
        help=f"{', '.join(_NAMES)}, or a CSV file in torch.distributed.pipelining's format",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--blocking",
        action="store_true",
        help="time sends and receives as stock Megatron-core makes them: blocking (1f1b and interleaved only)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    costs = read_costs(options.costs)
    if options.schedule == "online":
        if options.blocking:
            raise InputError("--blocking needs a fixed order, online dispatch has none")
        schedule, simulation = None, simulate_online(costs)
    else:
        schedule = _fixed_schedule(options.schedule, costs)
        simulation = simulate(schedule, costs, blocking=options.blocking)
    outcome = Outcome(
        name=options.schedule,
        costs=costs,
        simulation=simulation,
        lower_bound=lower_bound(costs),
        schedule=schedule,
    )
    (print_json if options.json else print_text)(outcome)


def _fixed_schedule(name: str, costs: Costs) -> Schedule:
    if name == "planned":
        return plan(costs).schedule
    if name in CLASSIC_NAMES:
        return classic_schedule(name, costs)
    path = Path(name)
    if path.suffix.lower() != ".csv" and not path.exists():
        raise InputError(f"unknown schedule {name!r}: take one of {', '.join(_NAMES)}, or name a CSV file")
    return read_schedule(path, costs)
