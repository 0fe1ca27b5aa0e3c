# SPDX-License-Identifier: Apache-2.0
"""Reads what the user names on the command line: schedules, numbers."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.ir import Schedule, ScheduleError
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.order_registry import SCHEDULES, make_schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule


class InputError(Exception):
    """Input that cannot be used: the message names the file or the option, what is wrong and the remedy."""


SCHEDULE_NAMES = (*SCHEDULES, "planned", "online")


def fixed_schedule(name: str, costs: Costs) -> Schedule:
    """The named schedule or the CSV file `name`; raises InputError, ScheduleError or CostError."""
    if name in SCHEDULES:
        return make_schedule(name, costs.stages, costs.micro_batches, costs.chunks)
    path = Path(name)
    if path.suffix.lower() != ".csv" and not path.exists():
        raise InputError(f"unknown schedule {name!r}: take one of {', '.join(SCHEDULE_NAMES)}, or name a CSV file")
    return read_schedule(path, costs)


def placed_for(name: str | None, job: JobCosts) -> JobCosts:
    """`job` with the placement of the fixed schedule `name`, unless its costs are of one of their own."""
    if name is None or name in ("planned", "online") or job.base.custom_placement is not None:
        return job
    return job.placed(fixed_schedule(name, job.base).placement)


def read_schedule(path: Path, costs: Costs) -> Schedule:
    """The schedule of a CSV file, checked to be one that the pipeline of `costs` can run within its caps.

    Raises InputError if the file cannot be read, ScheduleError if the schedule cannot run.
    """
    text = read_text(path)
    try:
        schedule = schedule_from_csv(text, chunks=costs.chunks)
        if schedule.stages != costs.stages:
            raise ScheduleError(f"{schedule.stages} rows, but the costs have {costs.stages} stages; one row per stage")
        schedule = replace(schedule, micro_batches=costs.micro_batches)
        check_schedule(
            schedule,
            max_in_flight=costs.max_in_flight,
            released_at_backward_input=costs.released_at_backward_input,
        )
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", stage=error.stage, action=error.action) from error
    return schedule


def count(text: str) -> int:
    """argparse type of a count of stages or replicas."""
    if not text.isdecimal() or len(text) > 7 or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of stages or replicas")
    return int(text)


def seconds(text: str) -> float:
    """argparse type of a duration in seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def read_text(path: Path) -> str:
    """Text of a UTF-8 file; a byte order mark, which spreadsheets write, is no text. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
