# SPDX-License-Identifier: Apache-2.0
"""Our own traces: the directory that a run was given by --adaptra-trace-dir."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.telemetry.events.event_log import read_events
from adaptra_megatron.telemetry.events.events import LinkDetection, PlanSwitched, RunStarted, StampedEvent
from adaptra_megatron.telemetry.tracing.trace import RankTrace, TraceError, read_trace
from adaptra_megatron.tools.recordings.recording import (
    ALL_STEPS,
    Beginning,
    Recording,
    RecordingError,
    Wanted,
    no_such_step,
    numbered,
    understood,
)
from adaptra_megatron.tools.recordings.run_files import Numbering, find_pipelines, renumbered
from adaptra_megatron.tools.recordings.run_record import began_at, numbered_by_traces, replicas_of
from adaptra_megatron.tools.replay.operations import Operation, RecordedStep, with_sequence_numbers
from adaptra_megatron.tools.replay.pipelines import KINDS

_OPTYPES = {str(kind): optype for optype, kind in KINDS.items()}


def read_run_directory(directory: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """The training iterations that all cells have finished, by Megatron's numbers where the log tells them:
    computation, and messages as far as they were waited for. An iteration that was run again counts as it was last.

    Of ranks that share a cell, the first stands for all. Raises TraceError and EventLogError as `run_record.read_run`,
    RecordingError if there is no such iteration, or stages left no trace.
    """
    log = read_events(directory)
    damage: list[str] = []
    cells = _cells(directory, log, damage)
    numbers = Numbering(log).of if log else numbered_by_traces(list(cells.values()))
    steps: dict[int, list[Operation]] = defaultdict(list)
    trained: dict[int, set[Cell]] = defaultdict(set)
    for cell, trace in cells.items():
        for record in trace.records:
            if record.kind in (Kind.BACKWARD.value, Kind.BACKWARD_INPUT.value):
                trained[record.iteration].add(cell)
            optype = _OPTYPES.get(record.kind)
            if optype is None:
                raise RecordingError(f"{directory}: rank {trace.rank} ran an action {record.kind!r}, which is unknown")
            times = (record.start_s, record.compute_s)
            steps[record.iteration].append(Operation(cell, optype, *times, 0, record.chunk, record.micro_batch))
    complete = {numbers(number): number for number in sorted(steps) if len(trained[number]) == len(cells)}
    if complete and not any(number in wanted for number in complete):
        raise no_such_step(str(directory), complete)
    found = understood(
        name=str(directory),
        source="a run's own traces",
        steps=[
            RecordedStep(number=number, operations=with_sequence_numbers(steps[own]))
            for number, own in sorted(complete.items())
            if number in wanted
        ],
        left_out=[
            f"step {numbers(number)} was trained by {len(cells_of)} of {len(cells)} cells: others had failed, or "
            "left no trace of it"
            for number, cells_of in sorted(trained.items())
            if 0 < len(cells_of) < len(cells) and numbers(number) in wanted
        ],
        notes=[f"{problem}." for problem in damage],
        one_clock=True,
    )
    return replace(found, beginnings=tuple(_beginnings(renumbered(log))))


def _beginnings(log: Sequence[StampedEvent]) -> list[Beginning]:
    """Return where a link was found to have changed, or a plan was switched."""
    whys: dict[int, list[str]] = defaultdict(list)
    for stamped in log:
        event, at = stamped.event, began_at(stamped)
        if isinstance(event, LinkDetection):
            why = f"link {event.source}→{event.target} found {event.after}"
        elif isinstance(event, PlanSwitched):
            why = "another plan"
        else:
            continue
        if why not in whys[at]:
            whys[at].append(why)
    return [Beginning(step=step, why=", ".join(each)) for step, each in sorted(whys.items())]


def _cells(directory: Path, log: Sequence[StampedEvent], damage: list[str]) -> dict[Cell, RankTrace]:
    """The first rank of each cell. Where the log does not name replicas, ranks of a stage are one each. Raises
    RecordingError where a stage of a replica left no trace."""
    pipelines = find_pipelines(directory, log)
    paths = sorted({path for lane in pipelines.lanes for path in lane} | set(directory.glob("rank-*.jsonl")))
    traces = []
    for path in paths:
        try:
            traces.append(read_trace(path, damage.append))
        except TraceError as error:
            damage.append(str(error))
    if not traces:
        raise TraceError(f"{directory} has no trace that can be read: {'; '.join(damage)}")
    traces.sort(key=lambda trace: trace.rank)
    replicas = replicas_of(log)
    named = all(trace.rank in replicas for trace in traces) and len(set(replicas.values())) > 1
    counts: dict[int, int] = defaultdict(int)
    found: dict[Cell, RankTrace] = {}
    for trace in traces:
        replica = replicas[trace.rank] if named else counts[trace.stage]
        counts[trace.stage] += 1
        found.setdefault(Cell(replica, trace.stage), trace)
    layouts = [stamped.event.layout for stamped in log if isinstance(stamped.event, RunStarted)]
    stages = max([pipelines.stages, *(layout.get("stages", 0) for layout in layouts)])
    for replica in sorted({cell.replica for cell in found}):
        if missing := [stage for stage in range(stages) if Cell(replica, stage) not in found]:
            of = f" of replica {replica}" if len(counts) and max(counts.values()) > 1 else ""
            raise RecordingError(
                f"{directory} lacks the traces of stage {numbered(missing)}{of}: "
                f"{'; '.join(pipelines.missing) or 'copy the files of all hosts into one directory'}"
            )
    return found
