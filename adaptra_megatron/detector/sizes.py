# SPDX-License-Identifier: Apache-2.0
"""Compares like with like where micro-batches are of different lengths: a stage that had more to do is not slow."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from adaptra_megatron.detector.samples import IterationSample, StageId, StageSample

Array = npt.NDArray[np.floating[Any]]
_Sort = tuple[int, str, int]
"""Stage, kind of action and chunk: what grows with the length alike in all pipelines."""
_PROPORTIONAL, _QUADRATIC = 1.0, 2.0
_ENOUGH = 0.1
"""Sum of squared logarithms of relative sizes from which on it is known how durations grow."""


class SizeModel:
    """How durations grow with the size of what is computed: as a power of it, between not at all and quadratically.

    The power is the slope of log(duration) over log(size) among the actions of each stage's iteration, by least
    squares over all iterations and pipelines: how fast a stage is moves its actions alike and does not count. Until
    sizes have differed within iterations, durations are taken to be proportional to them.
    """

    def __init__(self) -> None:
        self._usual: float | None = None
        """Size that durations are brought to: the median of the first iteration."""
        self._products: dict[_Sort, float] = defaultdict(float)
        self._squares: dict[_Sort, float] = defaultdict(float)

    def alike(self, sample: IterationSample) -> IterationSample:
        """`sample` with the durations that actions of the usual size would have had; learns from it unless something
        has disturbed it."""
        known = [np.asarray(sizes) for stage in sample.stages.values() for sizes in stage.sizes.values()]
        if not known:
            return sample
        together = np.concatenate(known)
        if self._usual is None:
            self._usual = float(np.median(together))
        if (together == self._usual).all():
            return sample
        if sample.disturbance is None:
            for identity, stage in sample.stages.items():
                self._learn(identity, stage)
        stages = {identity: self._of_usual_size(identity, stage) for identity, stage in sample.stages.items()}
        return dataclasses.replace(sample, stages=stages)

    def power(self, sort: _Sort) -> float:
        """The power of the size that durations of these actions grow with."""
        if self._squares[sort] < _ENOUGH:
            return _PROPORTIONAL
        return min(max(self._products[sort] / self._squares[sort], 0.0), _QUADRATIC)

    def _learn(self, identity: StageId, stage: StageSample) -> None:
        for (kind, chunk), given in stage.sizes.items():
            sizes, durations_s = np.asarray(given), np.asarray(stage.durations_s.get((kind, chunk), ()))
            if len(sizes) < 2 or len(sizes) != len(durations_s) or min(sizes.min(), durations_s.min()) <= 0:
                continue
            larger, longer = np.log(sizes), np.log(durations_s)
            larger -= larger.mean()
            sort = identity.stage, kind, chunk
            self._products[sort] += float(larger @ longer)
            self._squares[sort] += float(larger @ larger)

    def _of_usual_size(self, identity: StageId, stage: StageSample) -> StageSample:
        assert self._usual is not None, "sizes are known"
        found = dict(stage.durations_s)
        for (kind, chunk), given in stage.sizes.items():
            sizes = np.asarray(given, dtype=np.float64)
            if (kind, chunk) in found and sizes.min() > 0:
                scale = (self._usual / sizes) ** self.power((identity.stage, kind, chunk))
                found[kind, chunk] = np.asarray(found[kind, chunk]) * scale
        return dataclasses.replace(stage, durations_s=found)
