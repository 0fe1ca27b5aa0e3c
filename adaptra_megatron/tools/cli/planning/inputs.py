# SPDX-License-Identifier: Apache-2.0
"""Parse input of the command line: schedules, numbers with units, and ranges of these."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from adaptra_megatron.schedule.costs import CostError, Costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.ir import Schedule, ScheduleError
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.order_registry import SCHEDULES, make_schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_UNIT = r"[A-Za-z/]*?"
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
PER_SECOND = {
    f"{prefix}{unit}": factor / bits
    for unit, bits in (("B/s", 1.0), ("bit/s", 8.0), ("bps", 8.0), ("Bps", 1.0))
    for prefix, factor in _PREFIXES.items()
}
TIMES = {"": 1.0, "x": 1.0}
"""Units of factors."""
_MOST_UNITS_NAMED = 8
_DEFAULT_STEPS = 10
_MOST_STEPS = 1000


@dataclass(frozen=True)
class ValueRange:
    """Values of a sweep, first and last included, with equal differences or equal ratios."""

    first: float
    last: float
    steps: int
    logarithmic: bool = False
    unit: str = ""
    """The user's unit, in which values are shown."""
    scale: float = 1.0
    """That unit in the unit of the values."""

    @property
    def values(self) -> list[float]:
        return [self.at(step / self.steps) for step in range(self.steps + 1)]

    def at(self, share: float) -> float:
        """Return the value at `share` of the way from first to last."""
        if self.logarithmic:
            return self.first * math.exp(share * math.log(self.last / self.first))
        return self.first + (self.last - self.first) * share

    def shown(self, value: float) -> str:
        """Format `value` in the user's unit, without the unit."""
        return f"{value / self.scale:.6g}"


Value = float | ValueRange


def parsed_value(text: str, units: Mapping[str, float]) -> Value:
    """Parse a number with a unit, or `FROM..TO/STEPS`, where TO's unit also applies to a FROM without one.

    `FROM..TO/STEPS:log` and `FROM..TOxSTEPS` have equal ratios. 0 needs no unit. Raises ValueError with what is wrong.
    """
    last = rf"\.\.({_NUMBER})({_UNIT})(?:/(\d{{1,9}})(:log)?|x(\d{{1,9}}))?"
    found = re.fullmatch(rf"({_NUMBER})({_UNIT})(?:{last})?", text)
    if found is None:
        raise ValueError(f"has {text!r}, which is no number and no range such as 0..100ms/10 or 1..100ms/4:log")
    used = [unit for unit in (found[2], found[4]) if unit]
    for unit in used:
        if unit not in units:
            raise ValueError(f"has the unit {unit!r}, known are {_named(units)}")
    if found[3] is None:
        if "" not in units and not used and float(found[1]) != 0.0:
            raise ValueError(f"has {text!r} without a unit, known are {_named(units)}")
        return float(found[1]) * units.get(found[2], 1.0)
    if "" not in units and not used:
        raise ValueError(f"has {text!r} without a unit, known are {_named(units)}")
    steps, logarithmic = int(found[5] or found[7] or _DEFAULT_STEPS), bool(found[6] or found[7])
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"has {steps} steps in a range, 1 to {_MOST_STEPS} are possible")
    unit = found[4] or found[2]
    first, last_value = float(found[1]) * units[found[2] or unit], float(found[3]) * units[unit]
    if logarithmic and min(first, last_value) <= 0.0:
        raise ValueError(f"has {text!r}, a range in even ratios, which cannot begin or end at 0")
    return ValueRange(first, last_value, steps, logarithmic, unit, units[unit])


def whole_value(text: str) -> Value:
    """Parse a count, or a range of counts."""
    value = parsed_value(text, {"": 1.0})
    for end in (value.first, value.last) if isinstance(value, ValueRange) else (value,):
        if end != int(end) or end < 1:
            raise ValueError(f"has {end:g}, which is no whole number of at least 1")
    return value


def duration_s(text: str) -> float:
    """Parse a duration with its unit, above 0; return seconds."""
    value = parsed_value(text, SECONDS)
    if isinstance(value, ValueRange) or value <= 0.0:
        raise ValueError("is no duration above 0 such as 20min")
    return value


def share(text: str) -> float:
    """Parse a share above 0, such as 5% or 0.05."""
    found = re.fullmatch(rf"({_NUMBER})(%?)", text)
    value = float(found[1]) / (100.0 if found[2] else 1.0) if found else 0.0
    if value <= 0.0:
        raise ValueError("is no share above 0 such as 5%")
    return value


Parsed = TypeVar("Parsed")


def argument_type(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Return an argparse type that shows the text of a ValueError, which argparse itself drops."""

    def typed(text: str) -> Parsed:
        try:
            return parse(text)
        except CostError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from error

    return typed


def _named(units: Mapping[str, float]) -> str:
    names = [name for name in units if name]
    return ", ".join(names[:_MOST_UNITS_NAMED]) + (", ..." if len(names) > _MOST_UNITS_NAMED else "")


class InputError(Exception):
    """Input that cannot be used. Names the file or the option, what is wrong, and the remedy."""


SCHEDULE_NAMES = (*SCHEDULES, "planned", "online")


def fixed_schedule(name: str, costs: Costs) -> Schedule:
    """Return the schedule called `name`, or read it from the CSV file `name`. Raises InputError, ScheduleError or
    CostError."""
    if name in SCHEDULES:
        schedule = make_schedule(name, costs.stages, costs.micro_batches, costs.chunks)
        return schedule if costs.can_combine else schedule.separated()
    path = Path(name)
    if path.suffix.lower() != ".csv" and not path.exists():
        raise InputError(f"unknown schedule {name!r}: take one of {', '.join(SCHEDULE_NAMES)}, or name a CSV file")
    return read_schedule(path, costs)


def placed_for(name: str | None, job: JobCosts) -> JobCosts:
    """Return `job` with the placement of the fixed schedule `name`, unless its costs have a placement of their own."""
    if name is None or name in ("planned", "online") or job.base.custom_placement is not None:
        return job
    return replace(job, base=job.base.placed(fixed_schedule(name, job.base).placement))


def read_schedule(path: Path, costs: Costs) -> Schedule:
    """Read a schedule from a CSV file, and check that the pipeline of `costs` can run it within its caps.

    Without `combined_saving` in the costs, halves of combined actions are separated.

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
    return schedule if costs.can_combine else schedule.separated()


def count(text: str) -> int:
    """Parse a number of stages or replicas, as an argparse type."""
    if not text.isdecimal() or len(text) > 7 or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of stages or replicas")
    return int(text)


def seconds(text: str) -> float:
    """Parse a duration in seconds, above 0, as an argparse type."""
    return above_zero(text, "not a number of seconds")


def above_zero(text: str, otherwise: str) -> float:
    """Parse a number above 0. `otherwise`: what the text is if it is none, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is {otherwise} above 0")
    return value


def write_page(path: Path, page: str, option: str) -> None:
    """Write a page to the file that `option` names. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; name another {option}") from error


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark of spreadsheets. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
