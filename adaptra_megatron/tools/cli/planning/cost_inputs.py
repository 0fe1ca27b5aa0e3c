# SPDX-License-Identifier: Apache-2.0
"""The costs that `adaptra plan` and `adaptra simulate` are given: a file of costs, a run, its event log, or a trace."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, Override, job_costs, job_costs_from_json
from adaptra_megatron.schedule.more_memory import capped
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.telemetry.events.event_log import FILE_PATTERN, EventLogError, read_event_file, read_events
from adaptra_megatron.telemetry.events.events import PlanMade, StampedEvent
from adaptra_megatron.telemetry.tracing.trace import FILE_PATTERN as TRACES
from adaptra_megatron.telemetry.tracing.trace import TraceError
from adaptra_megatron.tools.cli.planning.inputs import InputError, read_text
from adaptra_megatron.tools.recordings.recording import RecordingError
from adaptra_megatron.tools.recordings.trace_events import head_of, is_other_document, is_other_format

STDIN = Path("-")
_TRACE_BEGINS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
"""A Chrome trace may be its list of events alone."""
_LARGEST_COSTS_NBYTES = 64 << 20
"""Larger files of JSON are traces."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Costs, and what is known of the run that they are from."""

    name: str
    job: JobCosts
    healthy: JobCosts | None = None
    """What its first plan was made for; None where that is not known, or it is this one."""
    now_s: float | None = None
    """What the running order was predicted to take at these costs."""
    order: Schedule | None = None
    """The order that ran, where it was recorded."""


def read_given(path: Path, number: int | None = None, pipeline_size: int | None = None) -> PlanInput:
    """Return what `path` tells: COSTS.json ("-": stdin), the directory of a run, an events-*.jsonl file, or a trace.

    Of a run, `number` picks the plan whose costs are taken; None: the latest. Of a trace, the typical step counts;
    `pipeline_size` is its number of stages, where it does not say it. Raises InputError if nothing can be read,
    CostError for costs that cannot be.
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
    """Return whether a file is a trace, or of another tool that `read_recording` knows by name, and no costs."""
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
    """The plan `number` of the replica that is the slowest at the end: each decides for itself."""
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
    """The typical step of a trace; a stage may hold what the fullest one held. Raises InputError also where its replay
    does not explain what was recorded. Needs numpy."""
    _refuse_number(number, str(path))
    try:
        from adaptra_megatron.tools.analysis.analysis import doubt_of, replayable, typical
        from adaptra_megatron.tools.recordings.reading import read_recording
        from adaptra_megatron.tools.recordings.recorded_places import Asked
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
    base, *others = (capped(costs, held) for costs in found.replicas)
    overrides = [
        Override(
            replicas=(replica,),
            tables=costs.tables(),
            micro_batches={
                name: tuple(
                    tuple(costs.micro_batch_s(name, stage, chunk) for chunk in range(costs.chunks))
                    for stage in range(costs.stages)
                )
                for name in costs.micro_batch_factors
            },
        )
        for replica, costs in enumerate(others, start=1)
    ]
    job = job_costs(base, replicas=len(found.replicas), overrides=overrides)
    return PlanInput(name=str(path), job=job, order=found.schedule)


def _refuse_number(number: int | None, name: str) -> None:
    if number is not None:
        raise InputError(f"--plan {number} picks a plan of a run: {name} holds one set of costs")
