# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs: compute seconds per stage and chunk, link seconds per direction, activation caps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_ROUNDING = 1e-9
"""Released fractions of an activation are not exact in binary."""


class CostError(ValueError):
    """Costs that cannot be: the message names the field, the stage or link, and the value."""


class LinkCost(NamedTuple):
    """One directed link between two pipeline ranks."""

    latency_s: float = 0.0
    """From the moment the last byte has left until the receiver has the message."""
    occupancy_s: float = 0.0
    """Seconds one message keeps the link busy (message bytes / bandwidth); the next one waits."""


PerChunk = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one iteration of a pipeline.

    `forward_s[stage][chunk]` and so on are seconds. `links[(source, target)]` joins pipeline ranks; what is not
    listed costs nothing. Messages of one link arrive in the order in which they were sent. `max_in_flight[stage]`
    is the cap on activations held at once: each forward takes 1, its input gradient gives
    `released_at_backward_input` back and its weight gradient the rest; None means no cap.

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
    released_at_backward_input: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CostError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("forward_s", "backward_input_s", "backward_weight_s"):
            _check_table(name, getattr(self, name), self.stages, self.chunks)
        for (source, target), cost in self.links.items():
            _check_link(source, target, cost, self.stages)
        if not self.max_in_flight:
            object.__setattr__(self, "max_in_flight", (None,) * self.stages)
        if len(self.max_in_flight) != self.stages:
            raise CostError(f"max_in_flight has {len(self.max_in_flight)} entries for {self.stages} stages")
        for stage, cap in enumerate(self.max_in_flight):
            if cap is not None and not (is_number(cap) and cap >= 1):
                raise CostError(
                    f"max_in_flight of stage {stage} is {cap!r}: at least 1 is needed to run a single forward"
                )
        if not (is_number(self.released_at_backward_input) and 0.0 <= self.released_at_backward_input <= 1.0):
            raise CostError(
                f"released_at_backward_input must be between 0 and 1, got {self.released_at_backward_input!r}"
            )

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

    @property
    def backward_s(self) -> PerChunk:
        """Input plus weight gradient."""
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
) -> Costs:
    """Costs with the same seconds (per chunk) on every stage and one cap for all."""

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
        released_at_backward_input=released_at_backward_input,
    )


_FIELDS = {
    "stages",
    "chunks",
    "micro_batches",
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "links",
    "max_in_flight",
    "released_at_backward_input",
}


def costs_from_json(document: Any) -> Costs:
    """Costs from the parsed JSON document that `adaptra plan` and `adaptra simulate` read.

    Times may be one number (the same everywhere), one per stage, or one row per stage with one value per chunk.
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
    released = document.get("released_at_backward_input", 0.0)
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=document["micro_batches"],
        forward_s=table_from_json("forward_s", document["forward_s"], stages, chunks),
        backward_input_s=table_from_json("backward_input_s", document["backward_input_s"], stages, chunks),
        backward_weight_s=table_from_json("backward_weight_s", document["backward_weight_s"], stages, chunks),
        links=_links_from_json(document.get("links") or []),
        max_in_flight=_caps_from_json(document.get("max_in_flight"), stages),
        released_at_backward_input=released,
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
        "links": [
            {"from": source, "to": target, "latency_s": cost.latency_s, "occupancy_s": cost.occupancy_s}
            for (source, target), cost in sorted(costs.links.items())
        ],
        "max_in_flight": list(costs.max_in_flight),
        "released_at_backward_input": costs.released_at_backward_input,
    }


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
        unknown = sorted(set(entry) - {"from", "to", "latency_s", "occupancy_s"})
        if unknown:
            raise CostError(f"unknown field {unknown[0]!r} in link {entry['from']}->{entry['to']}")
        ends = (entry["from"], entry["to"])
        if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
            raise CostError(f"link {ends[0]!r}->{ends[1]!r} must join two stage numbers")
        if ends in links:
            raise CostError(f"link {ends[0]}->{ends[1]} is listed twice")
        links[ends] = LinkCost(entry.get("latency_s", 0.0), entry.get("occupancy_s", 0.0))
    return links


def _caps_from_json(value: Any, stages: int) -> tuple[float | None, ...]:
    if value is None or is_number(value):
        return (value,) * stages
    if isinstance(value, list):
        return tuple(value)
    raise CostError(f"max_in_flight must be null, a number or one per stage, got {value!r}")
