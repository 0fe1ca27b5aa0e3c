# SPDX-License-Identifier: Apache-2.0
"""`adaptra plan`: the best schedule for given costs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from adaptra_megatron.cli.inputs import InputError, read_costs, seconds
from adaptra_megatron.cli.outcome import Outcome, print_json, print_text
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "plan", help="find the fastest schedule within the memory cap", description="Find the fastest schedule."
    )
    parser.add_argument("costs", type=Path, metavar="COSTS.json", help="seconds of stages and links, caps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=seconds, metavar="SECONDS", help="plan for about so long")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="also write the schedule to this file")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    costs = read_costs(options.costs)
    start = time.perf_counter()
    found = plan(costs, deadline_s=options.deadline_s)
    planning_s = time.perf_counter() - start
    outcome = Outcome(
        name="planned",
        costs=costs,
        simulation=simulate(found.schedule, costs),
        lower_bound=found.lower_bound,
        schedule=found.schedule,
        planning_s=planning_s,
    )
    if options.csv is not None:
        try:
            options.csv.write_text(schedule_to_csv(found.schedule), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {options.csv}: {error.strerror or error}") from error
    (print_json if options.json else print_text)(outcome)
