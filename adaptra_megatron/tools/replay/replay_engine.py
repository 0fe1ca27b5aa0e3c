# SPDX-License-Identifier: Apache-2.0
"""Replay recorded steps, many at once: all steps of a graph, and several what-if questions. Compare cells with their
peers.

Times are numpy arrays of float64 seconds. Their last two axes are *questions* and *steps*; an axis of length 1 stands
for all. A step of 2,500 operations, 43 times and with 50 questions, takes about 0.1 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import RecordedStep, ReplayError
from adaptra_megatron.tools.replay.replay_graph import ReplayEvent, StepGraph, StepTimes, graph_of

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReplayBatch:
    """Steps with the same graph."""

    graph: StepGraph
    numbers: tuple[int, ...]
    delays_s: Times
    """[taker, step]; takers in the order of the graph's events."""
    work_s: Times
    """[event, step]."""

    @cached_property
    def takers(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each taker: index of its event, and the events that it waits for."""
        return tuple((index, taker.before) for index, event in enumerate(self.graph.events) for taker in event.takers)


def batches_of(
    steps: Sequence[RecordedStep], graphs: Sequence[tuple[StepGraph, StepTimes]] | None = None
) -> list[ReplayBatch]:
    """Group the steps by graph, the most frequent first. `graphs`: of the steps, if known. Raises ReplayError without
    steps, and as `graph_of`."""
    if not steps:
        raise ReplayError("there is no step to analyse: name others with --steps")
    found: dict[StepGraph, list[tuple[int, StepTimes]]] = {}
    for step, (graph, times) in zip(steps, graphs or map(graph_of, steps), strict=True):
        found.setdefault(graph, []).append((step.number, times))
    batches = [
        ReplayBatch(
            graph,
            tuple(number for number, _ in rows),
            np.array([times.delays_s for _, times in rows]).T,
            np.array([times.work_s for _, times in rows]).T,
        )
        for graph, rows in found.items()
    ]
    return sorted(batches, key=lambda batch: -len(batch.numbers))


Work = Callable[[int, ReplayEvent], Times]
"""Work of an event, by its index, as [question, step]."""


def replay(batch: ReplayBatch, work_s: Work | None = None, *, launch_delays: bool = True) -> Times:
    """Return the end of each event, [event, question, step], from the start of the step.

    `work_s`: None for the recorded work, as one question. Without `launch_delays`, hosts take no time, and all cells
    start at once.
    """
    return np.stack(np.broadcast_arrays(*_ends(batch, work_s, launch_delays)))


def step_seconds(batch: ReplayBatch, work_s: Work | None = None, *, launch_delays: bool = True) -> Times:
    """Return the end of the last event, [question, step], as in `replay`."""
    return reduce(np.maximum, _ends(batch, work_s, launch_delays))


def _ends(batch: ReplayBatch, work_s: Work | None, launch_delays: bool) -> list[Times]:
    ends: list[Times] = []
    taker = 0
    nothing = np.zeros((1, len(batch.numbers)))
    for index, event in enumerate(batch.graph.events):
        come: Times | None = None
        for _, before in event.takers:
            ready = nothing
            for other in before:
                ready = ends[other] if ready is nothing else np.maximum(ready, ends[other])
            if launch_delays:
                ready = ready + batch.delays_s[taker]
            come = ready if come is None or come is nothing else np.maximum(come, ready)
            taker += 1
        assert come is not None, "an event has a taker"
        ends.append(come + (batch.work_s[index] if work_s is None else work_s(index, event)))
    return ends


STEP_CHANGE = 0.08
"""Relative change that divides a recording, as in reports of runs."""
_SHORTEST_PART = 2
"""Minimum number of steps of a part."""


def paces_of(batches: Sequence[ReplayBatch]) -> dict[Cell, dict[int, float]]:
    """Return by cell and step the computation relative to the median of the stage's cells.

    For an even number of cells, the quicker of the middle two counts: of two cells, the slow one is compared with the
    other. A slow cell has a high value in every step, one with long micro-batches does not. With one replica, all are
    1.
    """
    found: dict[Cell, dict[int, float]] = {}
    for batch in batches:
        total_s = _computed_s(batch)
        for cell, row in total_s.items():
            peers = [other for place, other in total_s.items() if place.stage == cell.stage]
            usual = np.percentile(peers, 50, axis=0, method="lower")
            ratios = [float(mine / each) if each > 0.0 else 1.0 for mine, each in zip(row, usual, strict=True)]
            found.setdefault(cell, {}).update(zip(batch.numbers, ratios, strict=True))
    return found


def slowness_of(batches: Sequence[ReplayBatch]) -> dict[Cell, float]:
    """Return the slowness of each cell: its median over all steps."""
    return {cell: statistics.median(paces.values()) for cell, paces in paces_of(batches).items()}


def stage_paces_of(batches: Sequence[ReplayBatch]) -> dict[int, dict[int, float]]:
    """Return by stage and step the computation in all replicas relative to the mean of all stages."""
    found: dict[int, dict[int, float]] = {}
    for batch in batches:
        total_s: dict[int, Times] = {}
        for cell, row in _computed_s(batch).items():
            total_s[cell.stage] = total_s.get(cell.stage, np.zeros(len(batch.numbers))) + row
        mean_s = np.mean(list(total_s.values()), axis=0)
        for stage, row in total_s.items():
            found.setdefault(stage, {}).update(
                zip(batch.numbers, map(float, row / np.where(mean_s > 0.0, mean_s, 1.0)), strict=True)
            )
    return found


def changed_at(values: Mapping[int, float]) -> int | None:
    """Return the step at which `values`, by step, changed from one level to another; None if they did not.

    The levels are the medians of the two parts that fit best (least squares); each lasts at least two steps.
    """
    numbers, row = sorted(values), np.array([values[number] for number in sorted(values)])
    splits = range(_SHORTEST_PART, len(row) - _SHORTEST_PART + 1)
    if not splits:
        return None
    best = min(splits, key=lambda at: float(row[:at].var() * at + row[at:].var() * (len(row) - at)))
    before, after = float(np.median(row[:best])), float(np.median(row[best:]))
    return numbers[best] if abs(after - before) > STEP_CHANGE * before else None


def _computed_s(batch: ReplayBatch) -> dict[Cell, Times]:
    """Return the seconds of each cell's computation, by step."""
    found: dict[Cell, Times] = {}
    for index, event in enumerate(batch.graph.events):
        if event.optype.computes:
            cell = event.takers[0].cell
            found[cell] = found.get(cell, np.zeros(len(batch.numbers))) + batch.work_s[index]
    return found
