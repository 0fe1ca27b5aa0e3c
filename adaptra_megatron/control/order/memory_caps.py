# SPDX-License-Identifier: Apache-2.0
"""From the memory that ranks measured to the caps that plans keep; lives with the leader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.telemetry.figures.scalars import MemoryFigures

RISE_AFTER = 8
"""Iterations in a row in which there must be room for more before a cap rises."""
RISE_MARGIN = 0.25
"""Room that there must be then beyond a whole activation, in activations: what is just enough may not be next time."""
RELEASED_STEP = 0.125
"""Released fractions are rounded down to multiples of this: plans are not made anew for noise."""


@dataclass
class _StageCap:
    room: int
    """Activations, whole."""
    more_for: int = 0
    """Iterations in a row with room for more."""
    more: int = 0
    """The least of what there was room for in them."""


class MeasuredCaps:
    """Activations that each stage has room for, over all its replicas. Falls at once, rises slowly."""

    def __init__(self) -> None:
        self.latest: dict[int, StageMemory] = {}
        """By stage: the replica with the least room, in the latest iteration that told."""
        self._caps: dict[int, _StageCap] = {}
        self._released: dict[int, float] = {}
        self._guessed: set[int] = set()
        """Stages whose released fraction has not been measured yet."""

    def observe(self, reports: Iterable[tuple[int, StageMemory | None]]) -> None:
        """One iteration's reports of all ranks, each with its stage. Who reports nothing changes nothing."""
        least: dict[int, StageMemory] = {}
        for stage, memory in reports:
            if memory is None:
                continue
            if stage not in least or memory.room < least[stage].room:
                least[stage] = memory
            self._take_in_released(stage, memory)
        for stage, memory in least.items():
            self._take_in(stage, memory.room)
        self.latest |= least

    @property
    def rooms(self) -> Mapping[int, int]:
        """Activations by stage; without the stages of which nothing is known."""
        return {stage: cap.room for stage, cap in self._caps.items()}

    def released_at_backward_input(self, stages: int) -> tuple[float, ...]:
        """By stage, the fraction that it releases at least (negative: it holds that much more); 0 until it has told."""
        released = (self._released.get(stage, 0.0) for stage in range(stages))
        return tuple(math.floor(fraction / RELEASED_STEP) * RELEASED_STEP for fraction in released)

    def figures(self, caps: Sequence[float | None]) -> dict[int, MemoryFigures]:
        """Figures for TensorBoard and Prometheus, by stage; `caps`: what plans keep to."""
        return {
            stage: MemoryFigures(
                activation_nbytes=memory.activation_nbytes,
                free_nbytes=memory.free_nbytes,
                cap=caps[stage] or float(self._caps[stage].room),
            )
            for stage, memory in self.latest.items()
        }

    def short_of(self, caps: Sequence[float | None]) -> str | None:
        """The stage that has less room than `caps` allow it, in words."""
        for stage, cap in enumerate(caps):
            if stage in self._caps and cap is not None and self._caps[stage].room < cap:
                nbytes = self.latest[stage].activation_nbytes
                return (
                    f"stage {stage} may hold {cap:g} activations of {nbytes / 1e6:,.1f} MB, "
                    f"but has memory for {self._caps[stage].room}"
                )
        return None

    def _take_in_released(self, stage: int, memory: StageMemory) -> None:
        """The least of what was measured counts, and until then the least of what was guessed."""
        released, known = memory.released_at_backward_input, self._released.get(stage, 1.0)
        if released is None or (memory.guessed and stage in self._released and stage not in self._guessed):
            return
        if stage in self._guessed and not memory.guessed:
            self._guessed.remove(stage)
            known = 1.0
        if memory.guessed:
            self._guessed.add(stage)
        self._released[stage] = min(released, known)

    def _take_in(self, stage: int, room: float) -> None:
        whole = max(0, math.floor(room))
        cap = self._caps.get(stage)
        if cap is None:
            self._caps[stage] = _StageCap(whole)
            return
        if whole < cap.room:
            self._caps[stage] = _StageCap(whole)
            return
        more = math.floor(room - RISE_MARGIN)
        if more <= cap.room:
            cap.more_for = 0
            return
        cap.more = more if cap.more_for == 0 else min(cap.more, more)
        cap.more_for += 1
        if cap.more_for >= RISE_AFTER:
            self._caps[stage] = _StageCap(cap.more)
