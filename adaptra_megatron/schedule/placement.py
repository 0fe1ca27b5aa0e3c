# SPDX-License-Identifier: Apache-2.0
"""Which stage runs which part of the model: the table that says where every message goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.schedule.errors import ScheduleError


class Place(NamedTuple):
    """Where a virtual stage runs."""

    stage: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """The stage of each virtual stage; a stage's chunks are its virtual stages in the order of the model.

    So a list of stages says everything, and the CSV of a schedule says its placement. All stages hold equally many
    chunks, and each at least one. Raises ScheduleError at construction for any other table.
    """

    stage_of: tuple[int, ...]
    """By virtual stage."""

    def __post_init__(self) -> None:
        counts = Counter(self.stage_of)
        if sorted(counts) != list(range(len(counts))) or not all(type(stage) is int for stage in counts):
            raise ScheduleError(f"a placement names all of the stages 0, 1, ..., got {list(self.stage_of)}")
        if len(set(counts.values())) > 1:
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise ScheduleError(
                f"stage {many} holds {counts[many]} virtual stages and stage {few} holds {counts[few]}: all stages "
                "hold equally many chunks"
            )

    @cached_property
    def stages(self) -> int:
        return len(set(self.stage_of))

    @cached_property
    def chunks(self) -> int:
        """Chunks of each stage."""
        return len(self.stage_of) // self.stages if self.stage_of else 0

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """By virtual stage."""
        chunks: Counter[int] = Counter()
        found = []
        for stage in self.stage_of:
            found.append(Place(stage, chunks[stage]))
            chunks[stage] += 1
        return tuple(found)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The directed links (source, target) that messages take, each once, by source."""
        joined = {pair for ends in pairwise(self.stage_of) for pair in (ends, ends[::-1]) if ends[0] != ends[1]}
        return tuple(sorted(joined, key=lambda ends: (ends[0], (ends[1] - ends[0]) % self.stages)))

    @cached_property
    def _virtual_stages(self) -> dict[tuple[int, int], int]:
        return {place: virtual for virtual, place in enumerate(self.places)}

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Position in the model of `chunk` on `stage`. Raises KeyError where there is none."""
        return self._virtual_stages[stage, chunk]

    def next_place(self, stage: int, chunk: int) -> Place | None:
        """Where activations of `chunk` on `stage` go; None from the last virtual stage."""
        virtual = self._virtual_stages[stage, chunk] + 1
        return self.places[virtual] if virtual < len(self.places) else None

    def previous_place(self, stage: int, chunk: int) -> Place | None:
        """Where input gradients of `chunk` on `stage` go; None from the first virtual stage."""
        virtual = self._virtual_stages[stage, chunk] - 1
        return self.places[virtual] if virtual >= 0 else None

    @property
    def shares_links(self) -> bool:
        """Return whether a directed link carries activations and gradients."""
        activations = set(pairwise(self.stage_of))
        return any(source != target and (target, source) in activations for source, target in activations)

    def peers(self, stage: int) -> list[int]:
        """The other stages that `stage` exchanges messages with."""
        return [target for source, target in self.links if source == stage]


@lru_cache(maxsize=256)
def interleaved(stages: int, chunks: int) -> Placement:
    """Megatron's placement: virtual stage v is chunk v // stages of stage v % stages."""
    return Placement(tuple(range(stages)) * chunks)


@lru_cache(maxsize=256)
def v_shape(stages: int, chunks: int = 2) -> Placement:
    """The placement of ZB-V, V-Half and DualPipe-V: chunk 0 runs down the stages, chunk 1 back up, and so on in turn.

    With two chunks stage 0 holds both ends of the model: the embedding and the loss.
    """
    down = tuple(range(stages))
    return Placement(tuple(stage for chunk in range(chunks) for stage in (down[::-1] if chunk % 2 else down)))
