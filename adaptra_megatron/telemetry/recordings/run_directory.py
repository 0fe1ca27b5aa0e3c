# SPDX-License-Identifier: Apache-2.0
"""Our own traces: the directory that a run was given by --adaptra-trace-dir."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.replay.messages import with_messages
from adaptra_megatron.schedule.replay.operations import Operation, RecordedStep, numbered
from adaptra_megatron.schedule.replay.pipelines import KINDS
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.telemetry.events.event_log import read_events
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, Recording, Wanted
from adaptra_megatron.telemetry.run_record import replicas_of
from adaptra_megatron.telemetry.tracing.trace import RankTrace, read_traces

_OPTYPES = {str(kind): optype for optype, kind in KINDS.items()}


def read_run_directory(directory: Path, wanted: Wanted = ALL_STEPS) -> Recording:
    """The training iterations that all cells have finished: computation, and messages as far as they were waited for.

    Of ranks that share a cell, the first stands for all. Raises TraceError and EventLogError as `run_record.read_run`,
    RecordingError if there is no such iteration.
    """
    cells = _cells(directory)
    steps: dict[int, list[Operation]] = defaultdict(list)
    trained: dict[int, set[Cell]] = defaultdict(set)
    for cell, trace in cells.items():
        for record in trace.records:
            if record.iteration not in wanted:
                continue
            if record.kind in (Kind.BACKWARD.value, Kind.BACKWARD_INPUT.value):
                trained[record.iteration].add(cell)
            optype = _OPTYPES[record.kind]
            times = (record.start_s, record.compute_s)
            steps[record.iteration].append(Operation(cell, optype, *times, 0, record.chunk, record.micro_batch))
    complete = [number for number in sorted(steps) if len(trained[number]) == len(cells)]
    return Recording(
        name=str(directory),
        source="a run's own traces",
        steps=tuple(
            with_messages([RecordedStep(number=number, operations=numbered(steps[number])) for number in complete])
        ),
    )


def _cells(directory: Path) -> dict[Cell, RankTrace]:
    """The first rank of each cell. Where the log does not name replicas, ranks of a stage are one each."""
    traces = read_traces(directory)
    replicas = replicas_of(read_events(directory))
    named = all(trace.rank in replicas for trace in traces) and len(set(replicas.values())) > 1
    counts: dict[int, int] = defaultdict(int)
    found: dict[Cell, RankTrace] = {}
    for trace in traces:
        replica = replicas[trace.rank] if named else counts[trace.stage]
        counts[trace.stage] += 1
        found.setdefault(Cell(replica, trace.stage), trace)
    return found
