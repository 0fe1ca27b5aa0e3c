# SPDX-License-Identifier: Apache-2.0
"""How fast cells compute beside the others of their stage, and which straggle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from adaptra_megatron.detector.findings import Estimates
from adaptra_megatron.detector.samples import StageId
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.schedule.routing.plans import Move
from adaptra_megatron.telemetry.figures.scalars import CellFigures

STRAGGLES = 1.15
"""A cell that takes so many times as long as the fastest of its stage gives micro-batches away."""
MOST_SHOWN = 256
"""Figures of all cells are for jobs with no more than so many: all ranks get them in every iteration."""

Tables = dict[str, tuple[tuple[float, ...], ...]]
"""Seconds by table of `Costs`, [stage][chunk]."""


def cell_tables(costs: Costs, estimates: Estimates, pipelines: Iterable[int]) -> Tables:
    """Seconds of one replica's cells, each those of its slowest lane, as the tables of `costs`; what has not been
    measured takes what it does there. `pipelines`: the replica's, by their first ranks."""
    lanes, found = tuple(pipelines), Tables()
    split = any(map(any, costs.backward_weight_s))
    kinds = {"forward_s": "F", "backward_input_s": "I" if split else "B", "backward_weight_s": "W"}
    for name, kind in kinds.items():
        found[name] = tuple(
            tuple(
                max(_of_lanes(estimates, lanes, stage, kind, chunk), default=usual_s)
                for chunk, usual_s in enumerate(row)
            )
            for stage, row in enumerate(getattr(costs, name))
        )
    return found


def _of_lanes(estimates: Estimates, lanes: Iterable[int], stage: int, kind: str, chunk: int) -> list[float]:
    known = (estimates.stages.get(StageId(first, stage)) for first in lanes)
    durations = (lane.durations_s.get((kind, chunk)) for lane in known if lane is not None)
    return [seconds for seconds in durations if seconds is not None]


def seconds_of(tables: Sequence[Tables], without: Collection[Cell] = ()) -> dict[Cell, float]:
    """Seconds of a micro-batch at each cell. `tables`: by replica."""
    return {
        Cell(replica, stage): sum(sum(table[stage]) for table in found.values())
        for replica, found in enumerate(tables)
        for stage in range(len(found["forward_s"]))
        if Cell(replica, stage) not in without
    }


def cell_speeds(seconds: Mapping[Cell, float]) -> dict[Cell, float]:
    """Speed of each cell as a share of that of the fastest of its stage, 0..1. `seconds`: of a micro-batch."""
    fastest: dict[int, float] = {}
    for cell, each_s in seconds.items():
        fastest[cell.stage] = min(each_s, fastest.get(cell.stage, each_s))
    return {cell: fastest[cell.stage] / each_s for cell, each_s in seconds.items() if fastest[cell.stage] > 0}


def stragglers(speeds: Mapping[Cell, float], pinned: Iterable[int] = ()) -> dict[Cell, float]:
    """Cells that take much longer than the fastest of their stage, and how many times as long."""
    kept = set(pinned)
    return {cell: 1 / speed for cell, speed in speeds.items() if 1 / speed >= STRAGGLES and cell.stage not in kept}


def slowness(seconds: Mapping[Cell, float]) -> tuple[float, ...]:
    """How many times as long as the fastest replica each takes, by its slowest cell; 1 where it does not straggle."""
    longest: dict[int, float] = {}
    for cell, each_s in sorted(seconds.items()):
        longest[cell.replica] = max(each_s, longest.get(cell.replica, 0.0))
    factors = [each_s / min(longest.values()) for each_s in longest.values()]
    return tuple(factor if factor >= STRAGGLES else 1.0 for factor in factors)


def cell_figures(speeds: Mapping[Cell, float], moves: Iterable[Move]) -> dict[tuple[int, int], CellFigures]:
    """Figures by replica and stage: of all cells, or in a large job of those that straggle, give or take."""
    given: Counter[Cell] = Counter()
    taken: Counter[Cell] = Counter()
    for move in moves:
        given[move.source] += len(move.micro_batches)
        taken[move.target] += len(move.micro_batches)
    shown = set(speeds) if len(speeds) <= MOST_SHOWN else {*stragglers(speeds), *given, *taken}
    return {
        (cell.replica, cell.stage): CellFigures(speed=speeds[cell], given=given[cell], taken=taken[cell])
        for cell in sorted(shown & set(speeds))
    }
