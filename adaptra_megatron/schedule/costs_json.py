# SPDX-License-Identifier: Apache-2.0
"""Costs of one pipeline as JSON, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost, PerChunk, PerMicroBatch, is_number
from adaptra_megatron.schedule.errors import ScheduleError
from adaptra_megatron.schedule.placement import Placement, v_shape

_FIELDS = {field.name for field in fields(Costs)} - {"custom_placement", "micro_batch_factors"} | {"placement"}
_MOST = 1 << 20
"""Stages, chunks, both multiplied, and micro-batches: far above what pipelines have, far below what fills a memory."""
_TABLES = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")


def costs_from_json(document: Any) -> Costs:
    """Costs from the parsed JSON document that `adaptra plan` and `adaptra simulate` read.

    Times may be one number (the same everywhere), one per stage, or one row per stage with one value per chunk, and in
    place of a chunk's value a list with one per micro-batch; caps and released fractions one number or one per stage.
    `placement` is "interleaved" (as in Megatron, the default), "v-shape", or a list with the stage of each virtual
    stage.
    Raises CostError for a missing or unknown field or a wrong value.
    """
    if not isinstance(document, dict):
        raise CostError(f"costs must be a JSON object, got {type(document).__name__}")
    unknown = sorted(set(document) - _FIELDS)
    if unknown:
        raise CostError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    for name in ("stages", "micro_batches", "forward_s", "backward_input_s", "backward_weight_s"):
        if document.get(name) is None:
            raise CostError(f"field {name!r} is missing")
    stages, chunks = document["stages"], document.get("chunks", 1)
    for name, count in (("stages", stages), ("chunks", chunks), ("micro_batches", document["micro_batches"])):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CostError(f"{name} must be a whole number of at least 1, got {count!r}")
        if count > _MOST:
            raise CostError(f"{name} must be at most {_MOST}")
    if stages * chunks > _MOST:
        raise CostError(f"stages times chunks must be at most {_MOST}, got {stages} times {chunks}")
    given = {name: document[name] for name in _TABLES if document.get(name) is not None}
    differ = {name: value for name, value in given.items() if is_per_micro_batch(value)}
    tables = {
        name: ((0.0,) * chunks,) * stages if name in differ else table_from_json(name, value, stages, chunks)
        for name, value in given.items()
    }
    released = document.get("released_at_backward_input", 0.0)
    costs = Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=document["micro_batches"],
        forward_s=tables["forward_s"],
        backward_input_s=tables["backward_input_s"],
        backward_weight_s=tables["backward_weight_s"],
        links=_links_from_json(document.get("links") or []),
        max_in_flight=_per_stage("max_in_flight", document.get("max_in_flight"), stages),
        released_at_backward_input=_per_stage("released_at_backward_input", released, stages),
        backward_s=tables.get("backward_s"),
        shared_queue=document.get("shared_queue", False),
        serial_queue=document.get("serial_queue", False),
        custom_placement=_placement_from_json(document.get("placement"), stages, chunks),
    )
    return costs.with_micro_batches(
        {name: micro_batches_from_json(name, value, costs) for name, value in differ.items()}
    )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """The document that `costs_from_json` reads back as equal costs."""
    custom = costs.custom_placement
    return {
        "stages": costs.stages,
        "chunks": costs.chunks,
        **({} if custom is None else {"placement": list(custom.stage_of)}),
        "micro_batches": costs.micro_batches,
        "backward_s": None,
        **{name: _table_to_json(name, costs) for name in costs.tables()},
        "links": [
            {"from": source, "to": target, **cost._asdict()} for (source, target), cost in sorted(costs.links.items())
        ],
        "max_in_flight": list(costs.max_in_flight),
        "released_at_backward_input": list(costs.released_at_backward_input),
        "shared_queue": costs.shared_queue,
        "serial_queue": costs.serial_queue,
    }


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


def is_per_micro_batch(value: Any) -> bool:
    """Return whether some chunk's value is a list."""
    rows = [row for row in value if isinstance(row, list)] if isinstance(value, list) else []
    return any(isinstance(chunk, list) for row in rows for chunk in row)


def micro_batches_from_json(name: str, value: Any, costs: Costs) -> PerMicroBatch:
    """Seconds of each micro-batch, where a number stands for all of a chunk or of a stage; raises CostError."""
    count = costs.micro_batches
    rows = [row if isinstance(row, list) else [row] * costs.chunks for row in value]
    table = tuple(tuple(tuple(chunk) if isinstance(chunk, list) else (chunk,) * count for chunk in row) for row in rows)
    replace(costs, micro_batch_factors={name: table})  # seconds are checked as factors are: numbers of 0 or more
    return table


def _table_to_json(name: str, costs: Costs) -> list[list[Any]]:
    table = costs.tables()[name]
    if name not in costs.micro_batch_factors:
        return [list(row) for row in table]
    return [
        [list(costs.micro_batch_s(name, stage, chunk)) for chunk in range(costs.chunks)]
        for stage in range(costs.stages)
    ]


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


def _placement_from_json(value: Any, stages: int, chunks: int) -> Placement | None:
    if value is None or value == "interleaved":
        return None
    if value == "v-shape":
        return v_shape(stages, chunks)
    if not isinstance(value, list) or not all(type(stage) is int for stage in value):
        raise CostError(f'placement must be "interleaved", "v-shape" or a list of stages, got {value!r}')
    try:
        return Placement(tuple(value))
    except ScheduleError as error:
        raise CostError(f"placement: {error}") from error


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(value)
    if value is None or is_number(value):
        return (value,) * stages
    raise CostError(f"{name} must be a number or one per stage, got {value!r}")
