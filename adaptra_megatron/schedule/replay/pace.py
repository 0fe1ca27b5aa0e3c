# SPDX-License-Identifier: Apache-2.0
"""How slow each cell is beside its peers, step by step, and since when."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from adaptra_megatron.schedule.replay.engine import Batch, Times
from adaptra_megatron.schedule.routing.costs import Cell

STEP_CHANGE = 0.08
"""Relative change between two parts of a recording below which they count as one: that of the report of runs."""
_SHORTEST_PART = 2
"""Steps that a change has to last."""


def paces_of(batches: Sequence[Batch]) -> dict[Cell, dict[int, float]]:
    """For each cell and step, its computation over the median of the cells of its stage: of an even number, the quicker
    of the two in the middle, so that of two cells the slow one is compared with the other and not with both.

    A cell that is slow by itself is so in every step; one whose micro-batches were long is not. 1 for all where there
    is one replica: there is nothing to compare with.
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


def slowness_of(batches: Sequence[Batch]) -> dict[Cell, float]:
    """For each cell its pace, the median over all steps."""
    return {cell: statistics.median(paces.values()) for cell, paces in paces_of(batches).items()}


def stage_paces_of(batches: Sequence[Batch]) -> dict[int, dict[int, float]]:
    """For each stage and step, its computation in all replicas over the mean of all stages."""
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
    """The step at which `values`, by step, went from one level to another; None if they stayed at one.

    The levels are the medians of the two parts that fit best, by squares; each has to last two steps.
    """
    numbers, row = sorted(values), np.array([values[number] for number in sorted(values)])
    splits = range(_SHORTEST_PART, len(row) - _SHORTEST_PART + 1)
    if not splits:
        return None
    best = min(splits, key=lambda at: float(row[:at].var() * at + row[at:].var() * (len(row) - at)))
    before, after = float(np.median(row[:best])), float(np.median(row[best:]))
    return numbers[best] if abs(after - before) > STEP_CHANGE * before else None


def _computed_s(batch: Batch) -> dict[Cell, Times]:
    """Seconds of each cell's computation, by step."""
    found: dict[Cell, Times] = {}
    for index, event in enumerate(batch.graph.events):
        if event.optype.computes:
            cell = event.takers[0].cell
            found[cell] = found.get(cell, np.zeros(len(batch.numbers))) + batch.work_s[index]
    return found
