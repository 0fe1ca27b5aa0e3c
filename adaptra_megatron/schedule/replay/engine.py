# SPDX-License-Identifier: Apache-2.0
"""Replays recorded steps, many at a time: steps of one graph, and several questions of what would be if.

All times are numpy arrays of float64 seconds. Their last two axes are *questions* and *steps*; an axis of length 1
stands for all. A step of 2,500 operations, 43 times and with 50 questions, takes about 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from adaptra_megatron.schedule.replay.graph import Event, StepGraph, StepTimes, graph_of
from adaptra_megatron.schedule.replay.operations import RecordedStep, ReplayError

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Steps of one graph."""

    graph: StepGraph
    numbers: tuple[int, ...]
    delays_s: Times
    """[taker, step]; takers in the order of the graph's events."""
    work_s: Times
    """[event, step]."""

    @cached_property
    def takers(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Event of each taker, and what it waits for."""
        return tuple((index, taker.before) for index, event in enumerate(self.graph.events) for taker in event.takers)


def batches_of(
    steps: Sequence[RecordedStep], graphs: Sequence[tuple[StepGraph, StepTimes]] | None = None
) -> list[Batch]:
    """The steps by their graph, the most frequent first. `graphs`: of the steps, where they are known. Raises
    ReplayError for no step, and as `graph_of`."""
    if not steps:
        raise ReplayError("there is no step to analyse: name others with --steps")
    found: dict[StepGraph, list[tuple[int, StepTimes]]] = {}
    for step, (graph, times) in zip(steps, graphs or map(graph_of, steps), strict=True):
        found.setdefault(graph, []).append((step.number, times))
    batches = [
        Batch(
            graph,
            tuple(number for number, _ in rows),
            np.array([times.delays_s for _, times in rows]).T,
            np.array([times.work_s for _, times in rows]).T,
        )
        for graph, rows in found.items()
    ]
    return sorted(batches, key=lambda batch: -len(batch.numbers))


Work = Callable[[int, Event], Times]
"""Work of an event, by its index, as [question, step]."""


def replay(batch: Batch, work_s: Work | None = None, *, launch_delays: bool = True) -> Times:
    """When each event ends, [event, question, step], from the start of the step.

    `work_s` None: what was recorded, one question. Without `launch_delays` hosts take no time, and all cells start at
    once.
    """
    return np.stack(np.broadcast_arrays(*_ends(batch, work_s, launch_delays)))


def step_seconds(batch: Batch, work_s: Work | None = None, *, launch_delays: bool = True) -> Times:
    """[question, step]: until the last event has ended, as `replay`."""
    return reduce(np.maximum, _ends(batch, work_s, launch_delays))


def _ends(batch: Batch, work_s: Work | None, launch_delays: bool) -> list[Times]:
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
