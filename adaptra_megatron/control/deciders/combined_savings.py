# SPDX-License-Identifier: Apache-2.0
"""Learn what combined actions save, from the iterations that run some."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from adaptra_megatron.control.detector.observations import Estimates, StageId
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.schedule.costs import MOST_SAVED, PerPair

REMEMBERED = 8
"""Iterations with an action of a pair whose median its saving is: a slow one among them changes little."""


class CombinedSavings:
    """The savings of one job's combined actions, as in `Costs.combined_saving`.

    They are fractions of what both halves take alone, so they hold while a stage is slow, and while a plan combines
    nothing. Of pipelines side by side, the one that saves least counts.
    """

    def __init__(self, stages: int, chunks: int, planned_for: PerPair = ()) -> None:
        """`planned_for`: what an earlier leader knew; empty: nothing."""
        self._stages, self._chunks, self._planned_for = stages, chunks, planned_for
        self._found: dict[tuple[int, int, int], dict[int, deque[float]]] = defaultdict(dict)
        """By stage, chunk of the forward and chunk of the backward; then by pipeline."""

    def observe(self, measurements: Sequence[StageMeasurement], estimates: Estimates) -> None:
        """Take in one iteration of all ranks. `estimates`: of what actions take alone. A disturbed iteration is
        ignored."""
        if any(measurement.disturbance is not None for measurement in measurements):
            return
        for measurement in measurements:
            stage = estimates.stages.get(StageId(measurement.pipeline, measurement.stage))
            alone_s = {} if stage is None else stage.durations_s
            for (ahead, behind), saving in _savings(measurement, alone_s).items():
                latest = self._found[measurement.stage, ahead, behind]
                latest.setdefault(measurement.pipeline, deque(maxlen=REMEMBERED)).append(saving)

    def table(self) -> PerPair:
        """Return the savings. A pair that has never run saves what others of its stage do, else those of other stages;
        0 if none has run."""
        known = {
            (stage, ahead, behind): saving
            for stage, rows in enumerate(self._planned_for)
            for ahead, row in enumerate(rows)
            for behind, saving in enumerate(row)
        }
        known |= {
            place: min(map(statistics.median, of_pipelines.values())) for place, of_pipelines in self._found.items()
        }
        everywhere = _usual(known.values(), 0.0)
        usual = [
            _usual((saving for place, saving in known.items() if place[0] == stage), everywhere)
            for stage in range(self._stages)
        ]
        chunks = range(self._chunks)
        return tuple(
            tuple(tuple(known.get((stage, ahead, behind), usual[stage]) for behind in chunks) for ahead in chunks)
            for stage in range(self._stages)
        )


def _usual(savings: Iterable[float], otherwise: float) -> float:
    found = list(savings)
    return statistics.median(found) if found else otherwise


def _savings(
    measurement: StageMeasurement, alone_s: Mapping[tuple[str, int], float]
) -> Mapping[tuple[int, int], float]:
    """Return the savings of an iteration by the chunks of forward and backward, where both are known alone."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (ahead, kind, behind), seconds in measurement.combined_s.items():
        forward_s, input_s, weight_s = (
            alone_s.get(key, math.nan) for key in (("F", ahead), ("I", behind), ("W", behind))
        )
        whole_s = alone_s.get(("B", behind), input_s + weight_s)
        apart_s = forward_s + (whole_s if kind == "B" else input_s)
        if not math.isnan(apart_s + whole_s) and forward_s + whole_s > 0.0:
            found[ahead, behind] += ((apart_s - seconds) / (forward_s + whole_s)).tolist()
    return {pair: min(max(statistics.median(savings), -1.0), MOST_SAVED) for pair, savings in found.items()}
