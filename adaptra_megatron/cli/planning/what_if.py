# SPDX-License-Identifier: Apache-2.0
"""What-if options of `adaptra plan` and `adaptra simulate`: slower links and stages without editing the costs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from adaptra_megatron.cli.planning.inputs import InputError
from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.jobs.costs import JobCosts, LinkChange, Override
from adaptra_megatron.schedule.jobs.json_format import replica_numbers

_EXAMPLES = """\
examples:
  --slow-link 3-4:latency=60ms           the link between stages 3 and 4, both ways
  --slow-link 3to4:occupancy=5ms         one way; each message keeps it busy for 5 ms
  --slow-link 3-4:bandwidth=10Gbit/s     needs message_bytes in the costs
  --slow-stage 5:1.3                     a GPU that takes 30% longer
  --replicas 256 --slow-link 3-4:latency=60ms@3,17 --slow-stage 5:1.3@40-47
                                         in some of 256 data-parallel pipelines only
  --slow-link 3-4:latency=0..100ms/10    a table over 0, 10, ..., 100 ms: stock, zb-h1, planned, online
"""

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
PER_SECOND = {
    f"{prefix}{unit}/s": factor / bits
    for unit, bits in (("B", 1.0), ("bit", 8.0))
    for prefix, factor in (
        ("", 1.0),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("Ki", 2.0**10),
        ("Mi", 2.0**20),
        ("Gi", 2.0**30),
    )
}
_DEFAULT_STEPS = 10
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Range:
    """Evenly spaced values of a sweep, first and last included."""

    first: float
    last: float
    steps: int

    @property
    def values(self) -> list[float]:
        return [self.first + (self.last - self.first) * step / self.steps for step in range(self.steps + 1)]


Value = float | Range


@dataclass(frozen=True)
class SlowLink:
    """`--slow-link`: new costs of one or both directions of a link."""

    links: tuple[tuple[int, int], ...]
    values: dict[str, Value]
    """By name: latency and occupancy in seconds, bandwidth in bytes per second."""
    replicas: tuple[int, ...] | None

    def override(self, at: float | None, message_bytes: int | None) -> Override:
        """The change, with `at` for the range in it. Raises InputError for a bandwidth of messages of unknown size."""
        known = {name: _at(value, at) for name, value in self.values.items()}
        if "bandwidth" in known:
            if message_bytes is None:
                raise InputError(
                    "--slow-link: a bandwidth needs the size of the messages: add message_bytes to the costs, or give "
                    "occupancy, the seconds for which one message keeps the link busy"
                )
            if known["bandwidth"] <= 0.0:
                raise InputError("--slow-link: bandwidth must be above 0: give a range that starts above it")
            known["occupancy"] = message_bytes / known["bandwidth"]
        change = LinkChange(latency_s=known.get("latency"), occupancy_s=known.get("occupancy"))
        return Override(replicas=self.replicas, links=dict.fromkeys(self.links, change))


@dataclass(frozen=True)
class SlowStage:
    """`--slow-stage`: all actions of a stage take `factor` times as long."""

    stage: int
    factor: Value
    replicas: tuple[int, ...] | None

    def override(self, at: float | None, message_bytes: int | None) -> Override:
        """The change, with `at` for the range in it."""
        return Override(replicas=self.replicas, slow_stages={self.stage: _at(self.factor, at)})


Change = SlowLink | SlowStage


@dataclass(frozen=True)
class Swept:
    """The one value of the what-if options that is a range."""

    name: str
    """Such as "latency of link 3-4"."""
    unit: str
    """"s", "B/s" or ""."""
    range: Range


def add_what_if_options(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`, `--slow-link` and `--slow-stage`, and examples at the end of the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    group = parser.add_argument_group("what if", "VALUE may be a range FROM..TO/STEPS, which makes a table")
    group.add_argument("--replicas", type=int, metavar="COUNT", help="data-parallel pipelines (default: the costs')")
    group.add_argument(
        "--slow-link",
        dest="changes",
        action="append",
        default=[],
        type=argument_type(_slow_link),
        metavar="A-B:latency=VALUE,occupancy=VALUE,bandwidth=VALUE[@REPLICAS]",
        help="change costs of the link between two stages, both ways (AtoB: one way); costs that are not named stay",
    )
    group.add_argument(
        "--slow-stage",
        dest="changes",
        action="append",
        default=[],
        type=argument_type(_slow_stage),
        metavar="STAGE:FACTOR[@REPLICAS]",
        help="multiply the times of all actions of a stage by FACTOR",
    )


def swept_value(changes: Sequence[Change]) -> Swept | None:
    """The range in `changes`, if there is one. Raises InputError if there are two."""
    found = []
    for change in changes:
        if isinstance(change, SlowStage):
            if isinstance(change.factor, Range):
                found.append(Swept(f"factor of stage {change.stage}", "", change.factor))
            continue
        ends = f"{change.links[0][0]}{'-' if len(change.links) > 1 else 'to'}{change.links[0][1]}"
        found += [
            Swept(f"{name} of link {ends}", "B/s" if name == "bandwidth" else "s", value)
            for name, value in change.values.items()
            if isinstance(value, Range)
        ]
    if len(found) > 1:
        raise InputError(
            f"{len(found)} ranges ({', '.join(swept.name for swept in found)}): a table is over one of them"
        )
    return found[0] if found else None


def changed_job(job: JobCosts, changes: Sequence[Change], *, replicas: int | None, at: float | None = None) -> JobCosts:
    """`job` with what the options change, the range among them being at `at`.

    Raises InputError or CostError for stages, links and replicas that it does not have.
    """
    if not changes and replicas is None:
        return job
    overrides = [change.override(at, job.message_bytes) for change in changes]
    try:
        return job.changed(*overrides, replicas=replicas)
    except CostError as error:
        raise InputError(f"what-if options: {error}") from error


def _at(value: Value, at: float | None) -> float:
    if not isinstance(value, Range):
        return value
    assert at is not None, "a range is asked for at one of its values"
    return at


def _slow_link(text: str) -> SlowLink:
    found = re.fullmatch(r"(\d{1,9})(-|to)(\d{1,9}):([^@]+)(?:@(.+))?", text)
    if found is None:
        raise ValueError("is not like 3-4:latency=60ms, or 3to4:occupancy=5ms@0,8-15 for one way in some replicas")
    source, target = int(found[1]), int(found[3])
    units = {"latency": SECONDS, "occupancy": SECONDS, "bandwidth": PER_SECOND}
    values: dict[str, Value] = {}
    for part in found[4].split(","):
        name, _, amount = part.partition("=")
        if name not in units or name in values:
            raise ValueError(f"has {part!r} where one each of latency=, occupancy= and bandwidth= may stand")
        values[name] = parsed_value(amount, units[name])
    if {"bandwidth", "occupancy"} <= set(values):
        raise ValueError("has an occupancy and a bandwidth: one follows from the other, give one of them")
    links = ((source, target),) if found[2] == "to" else ((source, target), (target, source))
    return SlowLink(links, values, _replicas(found[5]))


def _slow_stage(text: str) -> SlowStage:
    found = re.fullmatch(r"(\d{1,9}):([^@]+)(?:@(.+))?", text)
    if found is None:
        raise ValueError("is not like 5:1.3, or 5:1.3@0,8-15 for some replicas")
    return SlowStage(int(found[1]), parsed_value(found[2], {"": 1.0, "x": 1.0}), _replicas(found[3]))


def parsed_value(text: str, units: dict[str, float]) -> Value:
    """A number with a unit, or `FROM..TO/STEPS`, where TO's unit also counts for a FROM without one."""
    found = re.fullmatch(rf"({_NUMBER})([A-Za-z/]*?)(?:\.\.({_NUMBER})([A-Za-z/]*?)(?:/(\d{{1,9}}))?)?", text)
    if found is None:
        raise ValueError(f"has {text!r}, which is no number and no range such as 0..100ms/10")
    used = [unit for unit in (found[2], found[4]) if unit is not None]
    for unit in used:
        if unit not in units and unit != "":
            raise ValueError(f"has the unit {unit!r}, known are {', '.join(filter(None, units))}")
    if "" not in units and not any(used):
        raise ValueError(f"has {text!r} without a unit, known are {', '.join(units)}")
    if found[3] is None:
        return float(found[1]) * units[found[2]]
    steps = int(found[5] or _DEFAULT_STEPS)
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"has {steps} steps in a range, 1 to {_MOST_STEPS} are possible")
    last_unit = units[found[4] or found[2]]
    first_unit = units[found[2]] if found[2] else last_unit
    return Range(float(found[1]) * first_unit, float(found[3]) * last_unit, steps)


def _replicas(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else replica_numbers([part.strip() for part in text.split(",")])


Parsed = TypeVar("Parsed")


def argument_type(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """An argparse type that says what is wrong: argparse itself drops the words of a ValueError."""

    def typed(text: str) -> Parsed:
        try:
            return parse(text)
        except CostError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from error

    return typed
