# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs: compute seconds per stage and chunk, link seconds per direction, activation caps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.placement import Placement, interleaved

LEAST_RELEASED = -16.0
"""The least that an input gradient can be said to release, in activations. With sequence parallelism over t ranks, a
Transformer Engine layer holds about 17 / t after its forward, in units of one full hidden state, and until its weight
gradients the gathered inputs and output gradients of four linear layers, about 4: it adds 4 t / 17 of an activation,
which is 15 at t = 64. What is below is a mistake."""
_ROUNDING = 1e-9
"""Released fractions of an activation are not exact in binary."""


Released = float | Sequence[float]
"""Share of an activation that input gradients give back: on all stages alike, or one per stage."""


class CostError(ValueError):
    """Costs that cannot be: the message names the field, the stage or link, and the value."""


class LinkCost(NamedTuple):
    """One directed link between two pipeline ranks."""

    latency_s: float = 0.0
    """From the moment the last byte has left until the receiver has the message."""
    occupancy_s: float = 0.0
    """Seconds one message keeps the link busy (message bytes / bandwidth); the next one waits."""
    rendezvous: bool = False
    """Set if a message starts only once its receive has been posted, and keeps the link busy until it has arrived, as
    one of NCCL that is larger than its buffers: then latencies do not overlap. See `simulator`."""

    @property
    def transfer_s(self) -> float:
        """What one message takes that finds the link free."""
        return self.occupancy_s + self.latency_s


PerChunk = tuple[tuple[float, ...], ...]
PerMicroBatch = tuple[tuple[tuple[float, ...], ...], ...]
"""By stage, chunk and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one iteration of a pipeline.

    `forward_s[stage][chunk]` and so on are seconds; `backward_s` are those of whole backwards, None where they take
    what input and weight gradients take. `links[(source, target)]` joins pipeline ranks that are neighbours or exchange
    messages in the placement; what is not listed costs nothing. Messages of one link arrive in the order in which they
    were sent. `max_in_flight[stage]` is the cap on activations held at once: each forward takes 1, its input gradient
    gives `released_at_backward_input[stage]` back and its weight gradient the rest; None means no cap. Below 0, an
    input gradient adds to what is held. `shared_queue`: whether a stage's computation and its transfers over rendezvous
    links stand in one hardware queue; `serial_queue`: whether each of them also waits there for the end of the one
    before. Micro-batches that differ (in length, say) have a factor on the seconds of a
    table: `micro_batch_factors[name][stage][chunk][micro_batch]`; tables that it does not name are the same for all.

    Raises CostError at construction for anything inconsistent.
    """

    stages: int
    chunks: int
    micro_batches: int
    forward_s: PerChunk
    backward_input_s: PerChunk
    backward_weight_s: PerChunk
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    max_in_flight: tuple[float | None, ...] = ()
    released_at_backward_input: tuple[float, ...] = ()
    backward_s: PerChunk | None = None
    shared_queue: bool = False
    serial_queue: bool = False
    custom_placement: Placement | None = None
    """Which stage runs each virtual stage; None: Megatron's, which is also what Megatron's own table becomes."""
    micro_batch_factors: Mapping[str, PerMicroBatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CostError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, table in self.tables().items():
            _check_table(name, table, self.stages, self.chunks)
        for name, factors in self.micro_batch_factors.items():
            _check_factors(name, factors, self)
        self._check_placement()
        for (source, target), cost in self.links.items():
            _check_link(source, target, cost, self.placement)
        for name, usual in (("max_in_flight", None), ("released_at_backward_input", 0.0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (usual,) * self.stages)
            if len(getattr(self, name)) != self.stages:
                raise CostError(f"{name} has {len(getattr(self, name))} entries for {self.stages} stages")
        for stage, cap in enumerate(self.max_in_flight):
            if cap is not None and not (is_number(cap) and cap >= 1):
                raise CostError(
                    f"max_in_flight of stage {stage} is {cap!r}: at least 1 is needed to run a single forward"
                )
        for stage, released in enumerate(self.released_at_backward_input):
            if not (is_number(released) and LEAST_RELEASED <= released <= 1.0):
                raise CostError(
                    f"released_at_backward_input of stage {stage} must be between {LEAST_RELEASED:g} and 1, got "
                    f"{released!r}"
                )
        for name in ("shared_queue", "serial_queue"):
            if not isinstance(value := getattr(self, name), bool):
                raise CostError(f"{name} must be true or false, got {value!r}")
        if self.serial_queue and not self.shared_queue:
            raise CostError("serial_queue needs shared_queue: it says how that one starts what stands in it")

    def _check_placement(self) -> None:
        placement = self.custom_placement
        if placement is None:
            return
        if (placement.stages, placement.chunks) != (self.stages, self.chunks):
            raise CostError(
                f"placement is one of {placement.stages} stages with {placement.chunks} chunks each, the costs are of "
                f"{self.stages} stages with {self.chunks}"
            )
        if placement == interleaved(self.stages, self.chunks):
            object.__setattr__(self, "custom_placement", None)

    @property
    def placement(self) -> Placement:
        """Which stage runs each virtual stage."""
        return self.custom_placement or interleaved(self.stages, self.chunks)

    def placed(self, placement: Placement) -> Costs:
        """The same seconds of each stage, chunk and link, with the parts of the model placed otherwise."""
        return self if placement == self.placement else replace(self, custom_placement=placement)

    def link(self, source: int, target: int) -> LinkCost:
        """Cost of the directed link; free when not listed."""
        return self.links.get((source, target), NO_COST)

    def stages_over_cap(self, peaks: Sequence[float]) -> list[int]:
        """Stages that hold more activations than their cap. `peaks`: the most of each stage."""
        return [
            stage
            for stage, (peak, cap) in enumerate(zip(peaks, self.max_in_flight, strict=True))
            if cap is not None and peak > cap + _ROUNDING
        ]

    def tables(self) -> dict[str, PerChunk]:
        """All seconds per stage and chunk, by the name of their field; `backward_s` only where it is given."""
        names = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")
        return {name: table for name in names if (table := getattr(self, name)) is not None}

    def factors_of(self, name: str, stage: int, chunk: int) -> tuple[float, ...]:
        """Per micro-batch: the factor on `chunk`'s seconds in the table `name`."""
        given = self.micro_batch_factors.get(name)
        return (1.0,) * self.micro_batches if given is None else given[stage][chunk]

    def micro_batch_s(self, name: str, stage: int, chunk: int) -> tuple[float, ...]:
        """Per micro-batch: seconds that the table `name` and its factors come to; "backward_s": of whole backwards."""
        if name == "backward_s" and self.backward_s is None:
            halves = (self.micro_batch_s(half, stage, chunk) for half in ("backward_input_s", "backward_weight_s"))
            return tuple(map(sum, zip(*halves, strict=True)))
        seconds: float = getattr(self, name)[stage][chunk]
        return tuple(seconds * factor for factor in self.factors_of(name, stage, chunk))

    def with_micro_batches(self, seconds: Mapping[str, PerMicroBatch]) -> Costs:
        """The same costs with seconds [stage][chunk][micro_batch] by the name of their table, which gets the means."""
        means = {
            name: tuple(tuple(math.fsum(each) / len(each) for each in row) for row in table)
            for name, table in seconds.items()
        }
        factors = {
            name: tuple(
                tuple(tuple(value / mean if mean else 1.0 for value in each) for each, mean in zip(*rows, strict=True))
                for rows in zip(table, means[name], strict=True)
            )
            for name, table in seconds.items()
        }
        return replace(self.with_tables(means), micro_batch_factors={**self.micro_batch_factors, **factors})

    def with_tables(self, tables: Mapping[str, PerChunk]) -> Costs:
        """The same costs with other seconds per stage and chunk, by the name of their field."""
        changes: dict[str, Any] = dict(tables)
        return replace(self, **changes)

    @property
    def has_rendezvous(self) -> bool:
        """Return whether any link is a rendezvous link."""
        return any(cost.rendezvous for cost in self.links.values())

    @property
    def whole_backward_s(self) -> PerChunk:
        """Seconds of backwards that are not split."""
        if self.backward_s is not None:
            return self.backward_s
        return tuple(
            tuple(i + w for i, w in zip(input_row, weight_row, strict=True))
            for input_row, weight_row in zip(self.backward_input_s, self.backward_weight_s, strict=True)
        )


NO_COST = LinkCost()


def uniform_costs(
    stages: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float,
    links: Mapping[tuple[int, int], LinkCost] | None = None,
    max_in_flight: float | None = None,
    released_at_backward_input: float = 0.0,
    backward_s: float | None = None,
    shared_queue: bool = False,
) -> Costs:
    """Costs with the same seconds (per chunk) on every stage, one cap and one released fraction for all."""

    def table(seconds: float) -> PerChunk:
        return ((seconds,) * chunks,) * stages

    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        forward_s=table(forward_s),
        backward_input_s=table(backward_input_s),
        backward_weight_s=table(backward_weight_s),
        links=links or {},
        max_in_flight=(max_in_flight,) * stages,
        released_at_backward_input=(released_at_backward_input,) * stages,
        backward_s=None if backward_s is None else table(backward_s),
        shared_queue=shared_queue,
    )


def uniform_costs_for(
    schedule: Schedule,
    *,
    forward_s: float = 1.0,
    backward_input_s: float = 1.0,
    backward_weight_s: float = 1.0,
    links: Mapping[tuple[int, int], LinkCost] | None = None,
) -> Costs:
    """Uniform costs of the stages, chunks, micro-batches and placement of `schedule`, without caps."""
    costs = uniform_costs(
        schedule.stages,
        schedule.micro_batches,
        chunks=schedule.chunks,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links=links,
    )
    return costs.placed(schedule.placement)


def released_per_stage(released: Released, stages: int) -> tuple[float, ...]:
    """One for each of `stages`."""
    return tuple(released) if isinstance(released, Sequence) else (released,) * stages


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; True and False are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # whole numbers have no end, floats have
        return False


def _check_table(name: str, table: PerChunk, stages: int, chunks: int) -> None:
    if len(table) != stages:
        raise CostError(f"{name} has {len(table)} rows for {stages} stages")
    for stage, row in enumerate(table):
        if len(row) != chunks:
            raise CostError(f"{name} of stage {stage} has {len(row)} values for {chunks} chunks")
        for chunk, seconds in enumerate(row):
            if not is_number(seconds) or seconds < 0:
                raise CostError(f"{name} of stage {stage}, chunk {chunk} must be seconds >= 0, got {seconds!r}")


def _check_factors(name: str, factors: PerMicroBatch, costs: Costs) -> None:
    if name not in costs.tables():
        raise CostError(f"micro_batch_factors has {name!r}; there are {', '.join(costs.tables())}")
    shape = (costs.stages, costs.chunks, costs.micro_batches)
    if len(factors) != shape[0] or any(len(row) != shape[1] for row in factors):
        raise CostError(f"micro-batches of {name} are not given for {shape[0]} stages with {shape[1]} chunks each")
    for stage, row in enumerate(factors):
        for each in row:
            if len(each) != shape[2]:
                raise CostError(f"{name} of stage {stage} has {len(each)} values for {shape[2]} micro-batches")
            for micro_batch, factor in enumerate(each):
                if not is_number(factor) or factor < 0:
                    raise CostError(
                        f"{name} of stage {stage}, micro-batch {micro_batch} must be 0 or more, got {factor!r}"
                    )


def _check_link(source: int, target: int, cost: LinkCost, placement: Placement) -> None:
    stages = placement.stages
    if not (0 <= source < stages and 0 <= target < stages) or source == target:
        raise CostError(f"link {source}->{target} does not join two of the stages 0..{stages - 1}")
    if (target - source) % stages not in (1, stages - 1) and (source, target) not in placement.links:
        raise CostError(f"link {source}->{target} joins stages that are not neighbours in a pipeline of {stages}")
    for name, seconds in (("latency_s", cost.latency_s), ("occupancy_s", cost.occupancy_s)):
        if not is_number(seconds) or seconds < 0:
            raise CostError(f"{name} of link {source}->{target} must be seconds >= 0, got {seconds!r}")
    if not isinstance(cost.rendezvous, bool):
        raise CostError(f"rendezvous of link {source}->{target} must be true or false, got {cost.rendezvous!r}")
