# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs: compute seconds per stage and chunk, link seconds per direction, activation caps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

LEAST_RELEASED = -16.0
"""The least that an input gradient can be said to release, in activations. With sequence parallelism over t ranks, a
Transformer Engine layer holds about 17 / t after its forward, in units of one full hidden state, and until its weight
gradients the gathered inputs and output gradients of four linear layers, about 4: it adds 4 t / 17 of an activation,
which is 15 at t = 64. What is below is a mistake."""
_ROUNDING = 1e-9
"""Released fractions of an activation are not exact in binary."""


Released = float | Sequence[float]
"""Of an activation, what input gradients give back: on all stages alike, or one per stage."""


class CostError(ValueError):
    """Costs that cannot be: the message names the field, the stage or link, and the value."""


class LinkCost(NamedTuple):
    """One directed link between two pipeline ranks."""

    latency_s: float = 0.0
    """From the moment the last byte has left until the receiver has the message."""
    occupancy_s: float = 0.0
    """Seconds one message keeps the link busy (message bytes / bandwidth); the next one waits."""
    rendezvous: bool = False
    """Whether a message starts only once its receive has been posted, and keeps the link busy until it has arrived, as
    one of NCCL that is larger than its buffers: then latencies do not overlap. See `simulator`."""

    @property
    def transfer_s(self) -> float:
        """What one message takes that finds the link free."""
        return self.occupancy_s + self.latency_s


PerChunk = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one iteration of a pipeline.

    `forward_s[stage][chunk]` and so on are seconds; `backward_s` are those of whole backwards, None where they take
    what input and weight gradients take. `links[(source, target)]` joins pipeline ranks; what is not
    listed costs nothing. Messages of one link arrive in the order in which they were sent. `max_in_flight[stage]`
    is the cap on activations held at once: each forward takes 1, its input gradient gives
    `released_at_backward_input[stage]` back and its weight gradient the rest; None means no cap. Below 0, an input
    gradient adds to what is held. `shared_queue`: whether a stage's computation and its transfers over rendezvous links
    stand in one hardware queue.

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

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CostError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, table in self.tables().items():
            _check_table(name, table, self.stages, self.chunks)
        for (source, target), cost in self.links.items():
            _check_link(source, target, cost, self.stages)
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
        if not isinstance(self.shared_queue, bool):
            raise CostError(f"shared_queue must be true or false, got {self.shared_queue!r}")

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

    def with_tables(self, tables: Mapping[str, PerChunk]) -> Costs:
        """The same costs with other seconds per stage and chunk, by the name of their field."""
        changes: dict[str, Any] = dict(tables)
        return replace(self, **changes)

    @property
    def has_rendezvous(self) -> bool:
        """Whether any link is a rendezvous link."""
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


_FIELDS = {field.name for field in fields(Costs)}


def costs_from_json(document: Any) -> Costs:
    """Costs from the parsed JSON document that `adaptra plan` and `adaptra simulate` read.

    Times may be one number (the same everywhere), one per stage, or one row per stage with one value per chunk; caps
    and released fractions one number or one per stage.
    Raises CostError for a missing or unknown field or a wrong value.
    """
    if not isinstance(document, dict):
        raise CostError(f"costs must be a JSON object, got {type(document).__name__}")
    unknown = sorted(set(document) - _FIELDS)
    if unknown:
        raise CostError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    for name in ("stages", "micro_batches", "forward_s", "backward_input_s", "backward_weight_s"):
        if name not in document:
            raise CostError(f"field {name!r} is missing")
    stages, chunks = document["stages"], document.get("chunks", 1)
    for name, count in (("stages", stages), ("chunks", chunks)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CostError(f"{name} must be a whole number of at least 1, got {count!r}")
    whole = document.get("backward_s")
    released = document.get("released_at_backward_input", 0.0)
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=document["micro_batches"],
        forward_s=table_from_json("forward_s", document["forward_s"], stages, chunks),
        backward_input_s=table_from_json("backward_input_s", document["backward_input_s"], stages, chunks),
        backward_weight_s=table_from_json("backward_weight_s", document["backward_weight_s"], stages, chunks),
        links=_links_from_json(document.get("links") or []),
        max_in_flight=_per_stage("max_in_flight", document.get("max_in_flight"), stages),
        released_at_backward_input=_per_stage("released_at_backward_input", released, stages),
        backward_s=None if whole is None else table_from_json("backward_s", whole, stages, chunks),
        shared_queue=document.get("shared_queue", False),
    )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """The document that `costs_from_json` reads back as equal costs."""
    return {
        "stages": costs.stages,
        "chunks": costs.chunks,
        "micro_batches": costs.micro_batches,
        "forward_s": [list(row) for row in costs.forward_s],
        "backward_input_s": [list(row) for row in costs.backward_input_s],
        "backward_weight_s": [list(row) for row in costs.backward_weight_s],
        "backward_s": None if costs.backward_s is None else [list(row) for row in costs.backward_s],
        "links": [
            {"from": source, "to": target, **cost._asdict()} for (source, target), cost in sorted(costs.links.items())
        ],
        "max_in_flight": list(costs.max_in_flight),
        "released_at_backward_input": list(costs.released_at_backward_input),
        "shared_queue": costs.shared_queue,
    }


def released_per_stage(released: Released, stages: int) -> tuple[float, ...]:
    """One for each of `stages`."""
    return tuple(released) if isinstance(released, Sequence) else (released,) * stages


def is_number(value: object) -> bool:
    """Whether `value` is a finite number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_table(name: str, table: PerChunk, stages: int, chunks: int) -> None:
    if len(table) != stages:
        raise CostError(f"{name} has {len(table)} rows for {stages} stages")
    for stage, row in enumerate(table):
        if len(row) != chunks:
            raise CostError(f"{name} of stage {stage} has {len(row)} values for {chunks} chunks")
        for chunk, seconds in enumerate(row):
            if not is_number(seconds) or seconds < 0:
                raise CostError(f"{name} of stage {stage}, chunk {chunk} must be seconds >= 0, got {seconds!r}")


def _check_link(source: int, target: int, cost: LinkCost, stages: int) -> None:
    if not (0 <= source < stages and 0 <= target < stages) or source == target:
        raise CostError(f"link {source}->{target} does not join two of the stages 0..{stages - 1}")
    if (target - source) % stages not in (1, stages - 1):
        raise CostError(f"link {source}->{target} joins stages that are not neighbours in a pipeline of {stages}")
    for name, seconds in (("latency_s", cost.latency_s), ("occupancy_s", cost.occupancy_s)):
        if not is_number(seconds) or seconds < 0:
            raise CostError(f"{name} of link {source}->{target} must be seconds >= 0, got {seconds!r}")
    if not isinstance(cost.rendezvous, bool):
        raise CostError(f"rendezvous of link {source}->{target} must be true or false, got {cost.rendezvous!r}")


def table_from_json(name: str, value: Any, stages: int, chunks: int) -> PerChunk:
    """Seconds per stage and chunk from one number, one per stage, or one row per stage; raises CostError."""
    if is_number(value):
        return ((float(value),) * chunks,) * stages
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CostError(f"{name} must be a number or a list with one row per stage, got {value!r}")
    rows: list[tuple[float, ...]] = []
    for row in value:
        if is_number(row):
            rows.append((float(row),) * chunks)
        elif isinstance(row, Sequence) and not isinstance(row, str):
            rows.append(tuple(row))
        else:
            raise CostError(f"{name} of stage {len(rows)} must be a number or one number per chunk, got {row!r}")
    return tuple(rows)


def _links_from_json(value: Any) -> dict[tuple[int, int], LinkCost]:
    if not isinstance(value, list):
        raise CostError(f"links must be a list of objects, got {value!r}")
    links: dict[tuple[int, int], LinkCost] = {}
    for entry in value:
        if not isinstance(entry, dict) or not {"from", "to"} <= set(entry):
            raise CostError(f"a link needs 'from' and 'to', got {entry!r}")
        unknown = sorted(set(entry) - {"from", "to", *LinkCost._fields})
        if unknown:
            raise CostError(f"unknown field {unknown[0]!r} in link {entry['from']}->{entry['to']}")
        ends = (entry["from"], entry["to"])
        if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
            raise CostError(f"link {ends[0]!r}->{ends[1]!r} must join two stage numbers")
        if ends in links:
            raise CostError(f"link {ends[0]}->{ends[1]} is listed twice")
        links[ends] = LinkCost(**{name: value for name, value in entry.items() if name in LinkCost._fields})
    return links


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(value)
    if value is None or is_number(value):
        return (value,) * stages
    raise CostError(f"{name} must be a number or one per stage, got {value!r}")
