# SPDX-License-Identifier: Apache-2.0
"""Define the representation of a pipeline schedule that planner, simulator, executor, CSV and trace share.

A *stage* is a pipeline rank, a *chunk* is one of its model chunks, and a *virtual stage* is a position in the model:
virtual stage 0 holds the embedding, the last one the loss. The schedule's placement maps virtual stages to stages and
chunks; in Megatron's, chunk c of stage s is virtual stage `c * stages + s`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule breaks a rule: the message names rule, place, numbers and remedy.

    `stage` and `action` locate it; both are None if the schedule as a whole is wrong.
    """

    def __init__(self, message: str, *, stage: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.action = action


class MicroBatchCountError(ScheduleError, RuntimeError):
    """The last group of micro-batches is too small. Also a RuntimeError, which Megatron raises for this and scripts
    may catch."""


def require_counts(**counts: int) -> None:
    """Raise ScheduleError for a count that is not an integer of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, got {count!r}")


class Place(NamedTuple):
    """Stage and chunk of a virtual stage."""

    stage: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """The stage of each virtual stage. A stage's chunks are its virtual stages in model order.

    All stages hold equally many chunks, at least one. Raises ScheduleError at construction for any other table.
    """

    stage_of: tuple[int, ...]
    """Stage of each virtual stage."""

    def __post_init__(self) -> None:
        counts = Counter(self.stage_of)
        if sorted(counts) != list(range(len(counts))) or not all(type(stage) is int for stage in counts):
            raise ScheduleError(f"a placement must name every stage 0, 1, ..., got {list(self.stage_of)}")
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
        """Number of chunks per stage."""
        return len(self.stage_of) // self.stages if self.stage_of else 0

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Stage and chunk of each virtual stage."""
        chunks: Counter[int] = Counter()
        found = []
        for stage in self.stage_of:
            found.append(Place(stage, chunks[stage]))
            chunks[stage] += 1
        return tuple(found)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Directed links (source, target) that messages use, sorted."""
        joined = {pair for ends in pairwise(self.stage_of) for pair in (ends, ends[::-1]) if ends[0] != ends[1]}
        return tuple(sorted(joined, key=lambda ends: (ends[0], (ends[1] - ends[0]) % self.stages)))

    @cached_property
    def _virtual_stages(self) -> dict[tuple[int, int], int]:
        return {place: virtual for virtual, place in enumerate(self.places)}

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage of `chunk` on `stage`. Raises KeyError if there is none."""
        return self._virtual_stages[stage, chunk]

    def next_place(self, stage: int, chunk: int) -> Place | None:
        """Return the place that receives the activations of `chunk` on `stage`; None for the last virtual stage."""
        virtual = self._virtual_stages[stage, chunk] + 1
        return self.places[virtual] if virtual < len(self.places) else None

    def previous_place(self, stage: int, chunk: int) -> Place | None:
        """Return the place that receives the input gradients of `chunk` on `stage`; None for the first virtual
        stage."""
        virtual = self._virtual_stages[stage, chunk] - 1
        return self.places[virtual] if virtual >= 0 else None

    @property
    def shares_links(self) -> bool:
        """Return whether a directed link carries both activations and gradients."""
        activations = set(pairwise(self.stage_of))
        return any(source != target and (target, source) in activations for source, target in activations)

    def peers(self, stage: int) -> list[int]:
        """Return the stages that `stage` exchanges messages with."""
        return [target for source, target in self.links if source == stage]


@lru_cache(maxsize=256)
def interleaved(stages: int, chunks: int) -> Placement:
    """Return Megatron's placement: virtual stage v is chunk v // stages of stage v % stages."""
    return Placement(tuple(range(stages)) * chunks)


@lru_cache(maxsize=256)
def v_shape(stages: int, chunks: int = 2) -> Placement:
    """Return the placement of ZB-V, V-Half and DualPipe-V: chunk 0 runs down the stages, chunk 1 back up, and so on in
    turn.

    With two chunks stage 0 holds both ends of the model: the embedding and the loss.
    """
    down = tuple(range(stages))
    return Placement(tuple(stage for chunk in range(chunks) for stage in (down[::-1] if chunk % 2 else down)))


class Kind(str, enum.Enum):
    """Kind of an action. The letters are those of torch.distributed.pipelining's CSV."""

    FORWARD = "F"
    BACKWARD = "B"
    """Whole backward: input and weight gradients together."""
    BACKWARD_INPUT = "I"
    """The input gradient alone; a BACKWARD_WEIGHT of the same micro-batch and chunk must follow."""
    BACKWARD_WEIGHT = "W"
    """The weight gradient that a BACKWARD_INPUT left out."""

    def __str__(self) -> str:
        return self.value

    @property
    def sends_gradient(self) -> bool:
        """Return whether the action ends by sending an input gradient to the previous virtual stage."""
        return self is Kind.BACKWARD or self is Kind.BACKWARD_INPUT


class Action(NamedTuple):
    """One unit of work of one stage."""

    stage: int
    kind: Kind
    chunk: int
    micro_batch: int
    combined: bool = False
    """True for a forward that runs as one with the backward (B or I) right behind it in its stage's order.

    A *combined action* is such a pair: both run at once, layer by layer, so that the expert all-to-alls of one are
    hidden behind the computation of the other. It starts when both messages are there, and sends both together. To
    ignore the mark is always safe: the forward runs first, then the backward.
    """

    def __str__(self) -> str:
        pair = ", combined with the backward behind it" if self.combined else ""
        return f"stage {self.stage} {self.kind.value}(micro-batch {self.micro_batch}, chunk {self.chunk}){pair}"


Order = tuple[Action, ...]


def units(order: Iterable[Action]) -> Iterator[Order]:
    """Return what a stage runs as one, in order: (action,), or (forward, backward) of a combined action."""
    actions = iter(order)
    for action in actions:
        yield (action, next(actions)) if action.combined else (action,)


def chunks_in_order(actions: Iterable[Action]) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of a stage's forwards and backwards: 1 + chunk for a forward, negative for a backward; those of
    a combined action together.

    They are named as by Megatron's `convert_schedule_table_to_order`, by which layers are captured as CUDA graphs.
    Weight gradients do not count.
    """
    return tuple(
        tuple(1 + each.chunk if each.kind is Kind.FORWARD else -1 - each.chunk for each in unit)
        for unit in units(actions)
        if unit[0].kind is not Kind.BACKWARD_WEIGHT
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """Order of actions per stage. Unchecked: see `schedule_checks.check_schedule`."""

    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[Order, ...]
    custom_placement: Placement | None = None
    """None: Megatron's placement (Megatron's own table is turned into None)."""

    def __post_init__(self) -> None:
        if self.custom_placement is not None and self.custom_placement == interleaved(self.stages, self.chunks):
            object.__setattr__(self, "custom_placement", None)

    def __repr__(self) -> str:
        return f"<Schedule: {self.stages} stages x {self.chunks} chunks, {self.micro_batches} micro-batches>"

    @property
    def placement(self) -> Placement:
        """The placement of virtual stages, which determines the route of each message."""
        return self.custom_placement or interleaved(self.stages, self.chunks)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Return whether any backward is split into input and weight gradient."""
        return any(action.kind is Kind.BACKWARD_INPUT for order in self.orders for action in order)

    @property
    def combines(self) -> bool:
        """Return whether any action is a combined one."""
        return any(action.combined for order in self.orders for action in order)

    def separated(self) -> Schedule:
        """Return the schedule with the halves of combined actions run one after the other: forward, then backward."""
        orders = tuple(tuple(action._replace(combined=False) for action in order) for order in self.orders)
        return replace(self, orders=orders)
