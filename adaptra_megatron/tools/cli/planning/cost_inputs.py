# SPDX-License-Identifier: Apache-2.0
"""Read the costs for `adaptra plan` and `adaptra simulate`, and change them by the what-if options.

Costs come from a file of costs, a run, its event log, or a trace. Options change links, stages, caps and counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import (
    JobCosts,
    LinkChange,
    Override,
    job_costs_from_json,
    job_of,
    replica_numbers,
)
from adaptra_megatron.schedule.more_memory import capped
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.telemetry.event_log import FILE_PATTERN, EventLogError, read_event_file, read_events
from adaptra_megatron.telemetry.events import PlanMade, StampedEvent
from adaptra_megatron.telemetry.trace import FILE_PATTERN as TRACES
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.tools.cli.planning.inputs import (
    PER_SECOND,
    SECONDS,
    TIMES,
    InputError,
    Value,
    ValueRange,
    argument_type,
    parsed_value,
    read_text,
    whole_value,
)
from adaptra_megatron.tools.recordings.recording import RecordingError
from adaptra_megatron.tools.recordings.trace_events import head_of, is_other_document, is_other_format

_EXAMPLES = """\
examples:
  --slow-link 3-4:latency=60ms           the link between stages 3 and 4, both ways
  --slow-link 3to4:occupancy=5ms         one way; each message keeps it busy for 5 ms
  --slow-link 3-4:bandwidth=10Gbit/s     needs message_bytes in the costs
  --each-link latency=60ms               a table: each link in turn
  --slow-stage 5:1.3                     a GPU that takes 30% longer
  --replicas 256 --slow-link 3-4:latency=60ms@3,17 --slow-stage 5:1.3@40-47
                                         in some of 256 data-parallel pipelines only
  --slow-link 3-4:latency=0..100ms/10    a table over 0, 10, ..., 100 ms: stock, zb-h1, planned, online
  --slow-link 3-4:latency=1..100ms/4:log the same in even ratios, or 1..100msx4
  --slow-link 3-4:latency=0..100ms/5 --max-in-flight 8..20/6
                                         two ranges: the second makes columns
"""

At = Mapping[str, float]
"""The value that each range is at, by the range's name."""


@dataclass(frozen=True)
class SlowLink:
    """`--slow-link`: new costs of one or both directions of a link."""

    links: tuple[tuple[int, int], ...]
    values: dict[str, Value]
    """By name: latency and occupancy in seconds, bandwidth in bytes per second."""
    replicas: tuple[int, ...] | None = None
    label: str = ""
    """Name of the link; empty: by its ends."""

    def name_of(self, value: str) -> str:
        """Return the name of a range of `value`."""
        joint = "-" if len(self.links) > 1 else "to"
        return f"{value} of {self.label or f'link {self.links[0][0]}{joint}{self.links[0][1]}'}"

    def override(self, at: At, message_bytes: int | None) -> Override:
        """Return the change, with ranges at `at`.

        Raises InputError for a bandwidth if the size of messages is unknown.
        """
        known = {name: _at(value, self.name_of(name), at) for name, value in self.values.items()}
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

    @property
    def name(self) -> str:
        return f"factor of stage {self.stage}"

    def override(self, at: At, message_bytes: int | None) -> Override:
        """Return the change, with a range at `at`."""
        return Override(replicas=self.replicas, slow_stages={self.stage: _at(self.factor, self.name, at)})


Change = SlowLink | SlowStage


@dataclass(frozen=True)
class Axis:
    """Axis of a table: a what-if option with a range, or the links."""

    name: str
    """Such as "latency of link 3-4"."""
    unit: str
    """Unit of `values`: "s", "B/s" or ""."""
    values: tuple[float, ...]
    labels: tuple[str, ...]
    """The values in the user's notation, without the unit."""
    heading: str
    """The name, and the user's unit."""
    range: ValueRange | None = None


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """All what-if options."""

    changes: tuple[Change, ...]
    replicas: int | None
    max_in_flight: Value | None
    micro_batches: Value | None
    each_link: dict[str, Value] | None

    def axes(self, job: JobCosts) -> tuple[Axis, ...]:
        """Return the ranges, that of the rows first. Raises InputError if there are more than two."""
        found: list[Axis] = []
        if self.each_link is not None:
            labels = [f"{source}-{target}" for source, target in _pairs(job)]
            found.append(Axis("link", "", tuple(map(float, range(len(labels)))), tuple(labels), "link"))
        for name, unit, value in self._values():
            if isinstance(value, ValueRange):
                found.append(_axis(name, unit, value))
        if len(found) > 2:
            raise InputError(f"{len(found)} ranges ({', '.join(axis.name for axis in found)}): a table is over two")
        return tuple(found)

    def applied_to(self, job: JobCosts, at: At = {}) -> JobCosts:  # noqa: B006
        """Return `job` with all changes, ranges being at `at`.

        Raises InputError or CostError for stages, links and replicas that it does not have.
        """
        changes = list(self.changes)
        if self.each_link is not None and (pairs := _pairs(job)):
            changes.append(self._slow(pairs[int(at["link"])]))
        job = self.counted(job, at)
        overrides = [change.override(at, job.message_bytes) for change in changes]
        try:
            if self.max_in_flight is not None:
                cap = _at(self.max_in_flight, "max-in-flight", at)
                job = replace(job, base=capped(job.base, cap))
            return replace(job, overrides=(*job.overrides, *overrides)) if overrides else job
        except CostError as error:
            raise InputError(f"what-if options: {error}") from error

    def counted(self, job: JobCosts, at: At = {}) -> JobCosts:  # noqa: B006
        """Return `job` with only the numbers of replicas and micro-batches changed, as its healthy form needs them."""
        try:
            if self.micro_batches is not None:
                count = int(_at(self.micro_batches, "micro-batches", at))
                job = replace(job, base=replace(job.base, micro_batches=count))
            return job if self.replicas is None else replace(job, replicas=self.replicas)
        except CostError as error:
            raise InputError(f"what-if options: {error}") from error

    @property
    def slows(self) -> bool:
        """Whether any link or stage is changed."""
        return bool(self.changes) or self.each_link is not None

    def _slow(self, ends: tuple[int, int]) -> SlowLink:
        assert self.each_link is not None
        return SlowLink((ends, ends[::-1]), self.each_link, label="each link")

    def _values(self) -> list[tuple[str, str, Value | None]]:
        found: list[tuple[str, str, Value | None]] = []
        for change in (*self.changes, *([] if self.each_link is None else [self._slow((0, 1))])):
            if isinstance(change, SlowStage):
                found.append((change.name, "", change.factor))
                continue
            units = {"bandwidth": "B/s"}
            found += [(change.name_of(name), units.get(name, "s"), value) for name, value in change.values.items()]
        return [*found, ("max-in-flight", "", self.max_in_flight), ("micro-batches", "", self.micro_batches)]


def what_if(options: argparse.Namespace) -> WhatIf:
    """Return the what-if options as parsed."""
    return WhatIf(
        changes=tuple(options.changes),
        replicas=options.replicas,
        max_in_flight=options.max_in_flight,
        micro_batches=options.micro_batches,
        each_link=options.each_link,
    )


def add_what_if_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, and examples at the end of the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    group = parser.add_argument_group(
        "what if", "VALUE may be a range FROM..TO/STEPS, which makes a table; two ranges make rows and columns"
    )
    group.add_argument("--replicas", type=int, metavar="COUNT", help="data-parallel pipelines (default: the costs')")
    group.add_argument(
        "--max-in-flight", type=argument_type(whole_value), metavar="VALUE", help="activations that a stage may hold"
    )
    group.add_argument(
        "--micro-batches", type=argument_type(whole_value), metavar="VALUE", help="micro-batches of an iteration"
    )
    group.add_argument(
        "--slow-link",
        dest="changes",
        action="append",
        default=[],
        type=argument_type(slow_link),
        metavar="A-B:latency=VALUE,occupancy=VALUE,bandwidth=VALUE[@REPLICAS]",
        help="change costs of the link between two stages, both ways (AtoB: one way); costs that are not named stay",
    )
    group.add_argument(
        "--each-link",
        type=argument_type(link_values),
        metavar="latency=VALUE,occupancy=VALUE,bandwidth=VALUE",
        help="the same for each link in turn, to find the one that matters most",
    )
    group.add_argument(
        "--slow-stage",
        dest="changes",
        action="append",
        default=[],
        type=argument_type(slow_stage),
        metavar="STAGE:FACTOR[@REPLICAS]",
        help="multiply the times of all actions of a stage by FACTOR",
    )


def _axis(name: str, unit: str, value: ValueRange) -> Axis:
    values = value.values
    if name in ("max-in-flight", "micro-batches"):
        values = sorted({float(round(each)) for each in values}, reverse=value.first > value.last)
    heading = f"{name} ({value.unit})" if value.unit else name
    return Axis(name, unit, tuple(values), tuple(map(value.shown, values)), heading, value)


def _pairs(job: JobCosts) -> list[tuple[int, int]]:
    """Return the links of the pipeline, each once."""
    return sorted({(min(ends), max(ends)) for ends in job.base.placement.links})


def _at(value: Value, name: str, at: At) -> float:
    return at[name] if isinstance(value, ValueRange) else value


def slow_link(text: str) -> SlowLink:
    """Parse the value of `--slow-link`. Raises ValueError, as the following functions do."""
    found = re.fullmatch(r"(\d{1,9})(-|to)(\d{1,9}):([^@]+)(?:@(.+))?", text)
    if found is None:
        raise ValueError("is not like 3-4:latency=60ms, or 3to4:occupancy=5ms@0,8-15 for one way in some replicas")
    source, target = int(found[1]), int(found[3])
    links = ((source, target),) if found[2] == "to" else ((source, target), (target, source))
    return SlowLink(links, link_values(found[4]), _replicas(found[5]))


def link_values(text: str) -> dict[str, Value]:
    """Parse the value of `--each-link`."""
    units = {"latency": SECONDS, "occupancy": SECONDS, "bandwidth": PER_SECOND}
    values: dict[str, Value] = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        if name not in units or name in values:
            raise ValueError(f"has {part!r} where one each of latency=, occupancy= and bandwidth= may stand")
        values[name] = parsed_value(amount, units[name])
    if {"bandwidth", "occupancy"} <= set(values):
        raise ValueError("has an occupancy and a bandwidth: one follows from the other, give one of them")
    return values


def slow_stage(text: str) -> SlowStage:
    """Parse the value of `--slow-stage`."""
    found = re.fullmatch(r"(\d{1,9}):([^@]+)(?:@(.+))?", text)
    if found is None:
        raise ValueError("is not like 5:1.3, or 5:1.3@0,8-15 for some replicas")
    return SlowStage(int(found[1]), parsed_value(found[2], TIMES), _replicas(found[3]))


def _replicas(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else replica_numbers([part.strip() for part in text.split(",")])


STDIN = Path("-")
_TRACE_BEGINS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
"""Head of a Chrome trace that is only a list of events."""
_LARGEST_COSTS_NBYTES = 64 << 20
"""Largest JSON file of costs; larger ones are traces."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Costs, and facts of the run that they come from."""

    name: str
    job: JobCosts
    healthy: JobCosts | None = None
    """Costs of the run's first plan; None if unknown, or equal to `job`."""
    now_s: float | None = None
    """Predicted seconds of the running order at these costs."""
    order: Schedule | None = None
    """The order that ran, if recorded."""


def read_given(path: Path, number: int | None = None, pipeline_size: int | None = None) -> PlanInput:
    """Read `path`: COSTS.json ("-": stdin), the directory of a run, an events-*.jsonl file, or a trace.

    `number`: the run's plan whose costs are read; None: the latest. `pipeline_size`: number of stages, if a trace
    lacks it. A trace yields its typical step. Raises InputError if nothing can be read, CostError for invalid costs.
    """
    try:
        if path.is_dir():
            events = read_events(path) if any(path.glob(FILE_PATTERN)) else []
            planned = any(isinstance(found.event, PlanMade) for found in events)
            traced = any(path.glob(TRACES)) or (not events and any(path.glob("**/*.json*")))
            if traced and not planned:
                return _recorded(path, number, pipeline_size)
            return _from_events(str(path), events, number)
        if path.suffix == ".jsonl":
            return _from_events(str(path), list(read_event_file(path)), number)
        if path != STDIN and path.is_file() and _is_trace(path):
            return _recorded(path, number, pipeline_size)
    except (EventLogError, RecordingError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    name = "stdin" if path == STDIN else str(path)
    document = _document(path, name)
    _refuse_number(number, name)
    try:
        return PlanInput(name=name, job=job_costs_from_json(document))
    except CostError as error:
        raise CostError(f"{name}: {error}") from error


def _is_trace(path: Path) -> bool:
    """Return whether a file is a trace, or of another tool known by name, and no file of costs."""
    head = head_of(path)
    if _TRACE_BEGINS.match(head) or b'"traceEvents"' in head or is_other_format(head):
        return True
    if path.stat().st_size > _LARGEST_COSTS_NBYTES:
        return True
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError, InputError):
        return False
    return isinstance(document, dict) and ("traceEvents" in document or is_other_document(document))


def _document(path: Path, name: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if path == STDIN else read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON: {error}") from error


def _from_events(name: str, events: Iterable[StampedEvent], number: int | None) -> PlanInput:
    """Return the plan `number` of the replica that is slowest at the end, since each replica plans for itself."""
    by_leader: dict[int, list[PlanMade]] = defaultdict(list)
    for found in events:
        if isinstance(found.event, PlanMade) and found.event.costs:
            by_leader[found.stamp.rank].append(found.event)
    if not by_leader:
        raise InputError(
            f"{name} has no plan whose costs could be taken: name the --adaptra-trace-dir of a run that planned, one "
            "of its events-*.jsonl, a trace, or COSTS.json"
        )
    plans = max(by_leader.values(), key=lambda made: made[-1].predicted_s)
    chosen = plans[-1]
    if number is not None:
        adopted = {made.number: made for made in plans if made.adopted}
        if number not in adopted:
            raise InputError(f"{name} has no plan {number}: there are {', '.join(map(str, adopted)) or 'none'}")
        chosen = adopted[number]
    first = next(made for made in plans if _micro_batches(made) == _micro_batches(chosen))
    return PlanInput(
        name=f"{name}, plan {chosen.number}",
        job=_job(name, chosen),
        healthy=_job(name, first) if first.costs != chosen.costs else None,
        now_s=chosen.current_predicted_s,
    )


def _micro_batches(made: PlanMade) -> object:
    return made.costs.get("micro_batches")


def _job(name: str, made: PlanMade) -> JobCosts:
    try:
        return job_costs_from_json(dict(made.costs))
    except CostError as error:
        raise CostError(f"{name}, plan {made.number}: {error}") from error


def _recorded(path: Path, number: int | None, pipeline_size: int | None) -> PlanInput:
    """Return the typical step of a trace; caps are what its fullest stage held. Raises InputError also if the replay
    does not explain the recording. Needs numpy."""
    _refuse_number(number, str(path))
    try:
        from adaptra_megatron.tools.recordings.reading import read_recording
        from adaptra_megatron.tools.recordings.recorded_places import Asked
        from adaptra_megatron.tools.replay.analysis import doubt_of, replayable, typical
        from adaptra_megatron.tools.replay.operations import ReplayError
        from adaptra_megatron.tools.replay.pipelines import pipelines_of
        from adaptra_megatron.tools.replay.replay_engine import batches_of, step_seconds
    except ImportError as error:
        raise InputError(f"reading the trace {path} needs numpy: pip install numpy") from error
    try:
        steps, batches, _ = replayable(read_recording(path, asked=Asked(stages=pipeline_size)))
        step = typical(steps)
        found = pipelines_of(step, batches)
        (of_step,) = batches_of([step])
        made_s = [float(step_seconds(of_step, launch_delays=delays)[0, 0]) for delays in (True, False)]
    except (RecordingError, TraceError, EventLogError) as error:
        raise InputError(str(error)) from error
    except ReplayError as error:
        raise InputError(f"{path}: {error}") from error
    doubt = doubt_of([step.seconds], made_s[:1], made_s[1:], 0.0)
    if doubt:
        raise InputError(f"{path} is not understood, so no costs are taken from it: {doubt}")
    held = max(peak_in_flight(found.schedule, 0.0))
    # As they are: their tables hold how fast cells are, their factors how long micro-batches are.
    job = job_of([capped(costs, held) for costs in found.replicas])
    return PlanInput(name=str(path), job=job, order=found.schedule)


def _refuse_number(number: int | None, name: str) -> None:
    if number is not None:
        raise InputError(f"--plan {number} picks a plan of a run: {name} holds one set of costs")
