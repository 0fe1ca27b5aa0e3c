# SPDX-License-Identifier: Apache-2.0
"""Convert a recorded step into costs of its pipelines, for planner, simulator and routing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk, PerMicroBatch
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.tools.replay.operations import OpType, RecordedStep, ReplayError
from adaptra_megatron.tools.replay.replay_engine import ReplayBatch, slowness_of
from adaptra_megatron.tools.replay.replay_graph import blocks

KINDS = {
    OpType.FORWARD: Kind.FORWARD,
    OpType.BACKWARD: Kind.BACKWARD,
    OpType.BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    OpType.BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
}
_TABLES = {
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD_INPUT: "backward_input_s",
    Kind.BACKWARD_WEIGHT: "backward_weight_s",
}
_HALF = 0.5
"""Assumed share of the input gradient in a whole backward, if the parts were not recorded."""

Place = tuple[int, int, int]
"""Stage, chunk and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class RecordedPipelines:
    """Costs of one step, for all replicas.

    The seconds of a micro-batch at a cell are the stage's mean, times the cell's slowness, times the micro-batch's
    factor.
    """

    schedule: Schedule
    """The recorded order, of the first replica."""
    numbers: tuple[int, ...]
    """Numbers of the replicas."""
    replicas: tuple[Costs, ...]
    slowness: Mapping[Cell, float]
    """Time of each cell relative to the median of its stage's cells, over all steps."""

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients were recorded separately, not estimated."""
        return self.schedule.splits_backward


def pipelines_of(step: RecordedStep, batches: Sequence[ReplayBatch]) -> RecordedPipelines:
    """Return the pipelines of `step`, which is one of those in `batches`.

    Raises ReplayError if its replicas ran different actions, or no backward.
    """
    batch = next(each for each in batches if step.number in each.numbers)
    column = batch.numbers.index(step.number)
    seconds: dict[int, dict[tuple[Kind, Place], float]] = defaultdict(dict)
    transfers: dict[tuple[int, int], list[float]] = defaultdict(list)
    for index, event in enumerate(batch.graph.events):
        work_s = float(batch.work_s[index][column])
        if event.optype.computes:
            cell = event.takers[0].cell
            place = (cell.stage, event.chunk, event.micro_batch)
            seconds[cell.replica][KINDS[event.optype], place] = work_s
        elif event.link is not None:
            transfers[event.link].append(work_s)
    schedule = _schedule(step)
    slowness = slowness_of(batches)
    # Blocking exchanges use a link for one message at a time, and yield no separate bandwidth and latency.
    blocking = blocks(step.by_cell().values()) if step.blocking is None else step.blocking
    usual_s = {ends: statistics.median(row) for ends, row in sorted(transfers.items())}
    links = {
        ends: LinkCost(occupancy_s=each_s) if blocking else LinkCost(latency_s=each_s)
        for ends, each_s in usual_s.items()
    }
    tables = {replica: _split(found) for replica, found in sorted(seconds.items())}
    _check_alike(step, tables)
    _check_whole(step, schedule, next(iter(tables.values())))
    usual = _usual(tables, slowness)
    costs = tuple(_costs(schedule, tables[replica], usual, links, slowness, replica) for replica in tables)
    return RecordedPipelines(schedule=schedule, numbers=tuple(tables), replicas=costs, slowness=slowness)


def _schedule(step: RecordedStep) -> Schedule:
    orders = []
    for cell, operations in step.by_cell().items():
        if cell.replica == step.cells[0].replica:
            ran = [each for each in operations if each.optype.computes]
            orders.append(tuple(Action(cell.stage, KINDS[each.optype], each.chunk, each.micro_batch) for each in ran))
    actions = [action for order in orders for action in order]
    if not any(action.kind.sends_gradient for action in actions):
        raise ReplayError(f"step {step.number} has no backward of replica {step.cells[0].replica}: leave it out")
    return Schedule(
        stages=step.stages,
        chunks=1 + max(action.chunk for action in actions),
        micro_batches=1 + max(action.micro_batch for action in actions),
        orders=tuple(orders),
        custom_placement=step.custom_placement,
    )


_Seconds = dict[tuple[Kind, Place], float]


def _split(seconds: _Seconds) -> _Seconds:
    """Return the seconds with whole backwards split into their parts."""
    found: _Seconds = {}
    for (kind, place), each_s in seconds.items():
        if kind is Kind.BACKWARD:
            found[Kind.BACKWARD_INPUT, place] = _HALF * each_s
            found[Kind.BACKWARD_WEIGHT, place] = (1.0 - _HALF) * each_s
        else:
            found[kind, place] = each_s
    return found


def _check_whole(step: RecordedStep, schedule: Schedule, table: Mapping[tuple[Kind, Place], float]) -> None:
    for stage in range(schedule.stages):
        for chunk in range(schedule.chunks):
            for kind in _TABLES:
                for number in range(schedule.micro_batches):
                    if (kind, (stage, chunk, number)) not in table:
                        raise ReplayError(
                            f"step {step.number} has no {kind} of micro-batch {number} and chunk {chunk} on stage "
                            f"{stage}: routed or incomplete steps have no costs; name others with --steps"
                        )


def _check_alike(step: RecordedStep, tables: Mapping[int, _Seconds]) -> None:
    first, *others = tables.items()
    for replica, found in others:
        if odd := sorted(map(str, found.keys() ^ first[1].keys())):
            raise ReplayError(
                f"step {step.number}: replica {replica} and replica {first[0]} did not run the same actions "
                f"({odd[0]}): routed or incomplete steps have no costs; name others with --steps"
            )


def _usual(tables: Mapping[int, _Seconds], slowness: Mapping[Cell, float]) -> dict[tuple[Kind, int, int], float]:
    """Return the mean seconds of each kind, stage and chunk, on a cell that is not slow."""
    rows: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
    for replica, table in tables.items():
        for (kind, (stage, chunk, _)), each_s in table.items():
            rows[kind, stage, chunk].append(each_s / slowness[Cell(replica, stage)])
    return {key: statistics.fmean(row) for key, row in rows.items()}


def _costs(
    schedule: Schedule,
    table: _Seconds,
    usual: Mapping[tuple[Kind, int, int], float],
    links: Mapping[tuple[int, int], LinkCost],
    slowness: Mapping[Cell, float],
    replica: int,
) -> Costs:
    stages, chunks = range(schedule.stages), range(schedule.chunks)
    pace = [slowness[Cell(replica, stage)] for stage in stages]

    def factors(kind: Kind) -> PerMicroBatch:
        return tuple(
            tuple(
                tuple(
                    each_s / usual_s if (usual_s := pace[stage] * usual[kind, stage, chunk]) > 0.0 else 1.0
                    for each_s in (table[kind, (stage, chunk, number)] for number in range(schedule.micro_batches))
                )
                for chunk in chunks
            )
            for stage in stages
        )

    def seconds(kind: Kind) -> PerChunk:
        return tuple(tuple(pace[stage] * usual[kind, stage, chunk] for chunk in chunks) for stage in stages)

    return Costs(
        stages=schedule.stages,
        chunks=schedule.chunks,
        micro_batches=schedule.micro_batches,
        forward_s=seconds(Kind.FORWARD),
        backward_input_s=seconds(Kind.BACKWARD_INPUT),
        backward_weight_s=seconds(Kind.BACKWARD_WEIGHT),
        links=links,
        micro_batch_factors={name: factors(kind) for kind, name in _TABLES.items()},
        custom_placement=schedule.custom_placement,
    )
