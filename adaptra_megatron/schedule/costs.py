# SPDX-License-Identifier: Apache-2.0
"""Define the costs of a schedule: compute seconds per stage and chunk, link seconds per direction, activation caps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from adaptra_megatron.schedule.ir import Placement, Schedule, ScheduleError, interleaved, v_shape

LEAST_RELEASED = -16.0
"""Lower limit of the fraction that an input gradient releases, in activations.
An input gradient may need memory: with sequence parallelism over t ranks, a Transformer Engine layer holds about 17
/ t after its forward (unit: one full hidden state), and until its weight gradients the gathered inputs and output
gradients of four linear layers, about 4. That adds 4 t / 17 of an activation, 15 at t = 64."""
_ROUNDING = 1e-9
"""Tolerance for sums of released fractions, which binary numbers do not represent exactly."""


Released = float | Sequence[float]
"""Fraction of an activation that an input gradient releases: one number for all stages, or one per stage."""


class CostError(ValueError):
    """Inconsistent costs: the message names field, stage or link, and value."""


class LinkCost(NamedTuple):
    """Costs of one directed link between two pipeline ranks."""

    latency_s: float = 0.0
    """Seconds from the departure of a message's last byte to its arrival."""
    occupancy_s: float = 0.0
    """Seconds one message keeps the link busy (message bytes / bandwidth); the next one waits."""
    rendezvous: bool = False
    """True if a transfer starts only once its receive is posted, and occupies the link until it has arrived, as a
    message of NCCL larger than its buffers does: then latencies do not overlap. See `simulator`."""

    @property
    def transfer_s(self) -> float:
        """Seconds of one message on an idle link."""
        return self.occupancy_s + self.latency_s


PerChunk = tuple[tuple[float, ...], ...]
PerMicroBatch = tuple[tuple[tuple[float, ...], ...], ...]
"""Factors [stage][chunk][micro_batch]; None where a chunk has none."""
PerPair = tuple[tuple[tuple[float, ...], ...], ...]
"""Numbers [stage][chunk of the forward][chunk of the backward] of combined actions."""
MOST_SAVED = 0.5
"""Upper limit of what combining saves: a combined action takes no less than the longer of its halves."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one iteration of a pipeline.

    `forward_s[stage][chunk]` and the other tables are seconds. `backward_s` are seconds of whole backwards; None: the
    sum of input and weight gradient. `links[(source, target)]` joins pipeline ranks that are neighbours or exchange
    messages in the placement; unlisted links cost nothing. Messages of one link arrive in the order in which they were
    sent.

    `max_in_flight[stage]` is the cap on activations held at once; None: no cap. Each forward takes 1, its input
    gradient gives `released_at_backward_input[stage]` back (below 0: takes more) and its weight gradient the rest.
    `shared_queue`: whether a stage's computation and its transfers over rendezvous links share one hardware queue.
    `serial_queue`: whether each operation in that queue also waits for the end of the previous one.

    If micro-batches differ (in length, say), a table's seconds are multiplied by
    `micro_batch_factors[name][stage][chunk][micro_batch]`. Unnamed tables are the same for all micro-batches.

    A combined action takes as long as its halves, less `combined_saving[stage][forward chunk][backward chunk]` times
    the sum of the forward and the whole backward, and never less than the longer half. Empty: the job cannot combine.
    Both messages leave once `combined_sends_at` of its time is over.

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
    """Stage of each virtual stage; None: Megatron's placement (Megatron's own table is turned into None)."""
    micro_batch_factors: Mapping[str, PerMicroBatch] = field(default_factory=dict)
    combined_saving: PerPair = ()
    combined_sends_at: float = 1.0

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
        self._check_combined()
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
            raise CostError("serial_queue needs shared_queue: it sets how a shared queue starts its work")

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

    def _check_combined(self) -> None:
        table, chunks = self.combined_saving, self.chunks
        sizes = {len(row) for rows in table for row in (rows, *rows)}
        if table and (len(table) != self.stages or sizes != {chunks}):
            raise CostError(
                f"combined_saving must have {self.stages} stages with {chunks} rows of {chunks} values, one per chunk"
            )
        for stage, saving in ((stage, each) for stage, rows in enumerate(table) for row in rows for each in row):
            if not (is_number(saving) and -1.0 <= saving <= MOST_SAVED):
                raise CostError(
                    f"combined_saving of stage {stage} must be between -1 and {MOST_SAVED:g}, got {saving!r}"
                )
        if not (is_number(self.combined_sends_at) and 0.0 < self.combined_sends_at <= 1.0):
            raise CostError(f"combined_sends_at must be above 0 and at most 1, got {self.combined_sends_at!r}")

    @property
    def can_combine(self) -> bool:
        """Return whether the job can run combined actions."""
        return bool(self.combined_saving)

    @property
    def placement(self) -> Placement:
        """The placement of virtual stages."""
        return self.custom_placement or interleaved(self.stages, self.chunks)

    def placed(self, placement: Placement) -> Costs:
        """Return the same costs of each stage, chunk and link under another placement."""
        return self if placement == self.placement else replace(self, custom_placement=placement)

    def link(self, source: int, target: int) -> LinkCost:
        """Return the cost of a directed link; an unlisted one is free."""
        return self.links.get((source, target), NO_COST)

    def stages_over_cap(self, peaks: Sequence[float]) -> list[int]:
        """Return the stages that exceed their cap. `peaks`: most activations held by each stage."""
        return [
            stage
            for stage, (peak, cap) in enumerate(zip(peaks, self.max_in_flight, strict=True))
            if cap is not None and peak > cap + _ROUNDING
        ]

    def tables(self) -> dict[str, PerChunk]:
        """Return all tables [stage][chunk] of seconds by field name; `backward_s` only if given."""
        names = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")
        return {name: table for name in names if (table := getattr(self, name)) is not None}

    def factors_of(self, name: str, stage: int, chunk: int) -> tuple[float, ...]:
        """Return the factor of each micro-batch on `chunk`'s seconds in the table `name`."""
        given = self.micro_batch_factors.get(name)
        return (1.0,) * self.micro_batches if given is None else given[stage][chunk]

    def micro_batch_s(self, name: str, stage: int, chunk: int) -> tuple[float, ...]:
        """Return the seconds of each micro-batch, from table and factors; name "backward_s": of whole backwards."""
        if name == "backward_s" and self.backward_s is None:
            halves = (self.micro_batch_s(half, stage, chunk) for half in ("backward_input_s", "backward_weight_s"))
            return tuple(map(sum, zip(*halves, strict=True)))
        seconds: float = getattr(self, name)[stage][chunk]
        return tuple(seconds * factor for factor in self.factors_of(name, stage, chunk))

    def with_micro_batches(self, seconds: Mapping[str, PerMicroBatch]) -> Costs:
        """Return these costs with seconds [stage][chunk][micro_batch] by table name; the tables get the means."""
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
        """Return these costs with other tables [stage][chunk] of seconds, by field name."""
        changes: dict[str, Any] = dict(tables)
        return replace(self, **changes)

    @property
    def has_rendezvous(self) -> bool:
        """Return whether any link is a rendezvous link."""
        return any(cost.rendezvous for cost in self.links.values())

    @property
    def whole_backward_s(self) -> PerChunk:
        """Seconds [stage][chunk] of whole backwards."""
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
    combined_saving: float | None = None,
) -> Costs:
    """Make costs with the same seconds per chunk on all stages, one cap and one released fraction."""

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
        combined_saving=() if combined_saving is None else (((combined_saving,) * chunks,) * chunks,) * stages,
    )


def uniform_costs_for(
    schedule: Schedule,
    *,
    forward_s: float = 1.0,
    backward_input_s: float = 1.0,
    backward_weight_s: float = 1.0,
    links: Mapping[tuple[int, int], LinkCost] | None = None,
) -> Costs:
    """Make uniform costs, without caps, for the shape and placement of `schedule`."""
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
    """Return one released fraction per stage."""
    return tuple(released) if isinstance(released, Sequence) else (released,) * stages


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; booleans are not."""
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


_FIELDS = {field.name for field in fields(Costs)} - {"custom_placement", "micro_batch_factors"} | {"placement"}
_MOST = 1 << 20
"""Limit of stages, chunks, their product, and micro-batches in a document: far above real pipelines."""
_TABLES = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")


def costs_from_json(document: Any) -> Costs:
    """Read costs from the parsed JSON document of `adaptra plan` and `adaptra simulate`.

    Times: one number (for all), one per stage, or one row per stage with a value per chunk; in place of a chunk's
    value, a list with one per micro-batch. Caps and released fractions: one number or one per stage. `placement`:
    "interleaved" (Megatron's, the default), "v-shape", or a list with the stage of each virtual stage.

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
        combined_saving=_pairs_from_json(document.get("combined_saving"), stages, chunks),
        combined_sends_at=document.get("combined_sends_at", 1.0),
    )
    return costs.with_micro_batches(
        {name: micro_batches_from_json(name, value, costs) for name, value in differ.items()}
    )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """Return the document from which `costs_from_json` reads equal costs."""
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
        **({"combined_saving": costs.combined_saving} if costs.can_combine else {}),
        **({"combined_sends_at": costs.combined_sends_at} if costs.can_combine else {}),
    }


def table_from_json(name: str, value: Any, stages: int, chunks: int) -> PerChunk:
    """Read seconds [stage][chunk] from one number, one per stage, or one row per stage. Raises CostError."""
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
    """Return whether any chunk's value is a list."""
    rows = [row for row in value if isinstance(row, list)] if isinstance(value, list) else []
    return any(isinstance(chunk, list) for row in rows for chunk in row)


def micro_batches_from_json(name: str, value: Any, costs: Costs) -> PerMicroBatch:
    """Read seconds of each micro-batch; a number stands for all of a chunk or stage. Raises CostError."""
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


def _pairs_from_json(value: Any, stages: int, chunks: int) -> PerPair:
    """Read savings from one number, one per stage, or a value per pair of chunks; None: no action can be combined."""
    if value is None:
        return ()
    rows = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * stages
    if not all(is_number(row) or (isinstance(row, Sequence) and not isinstance(row, str)) for row in rows):
        raise CostError(f"combined_saving must be a number, one per stage, or rows per stage, got {value!r}")
    pairs = [[[row] * chunks] * chunks if is_number(row) else row for row in rows]
    if not all(isinstance(row, Sequence) for each in pairs for row in each):
        raise CostError(f"combined_saving of a stage must be a number or one row per chunk, got {value!r}")
    return tuple(tuple(map(tuple, each)) for each in pairs)


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(value)
    if value is None or is_number(value):
        return (value,) * stages
    raise CostError(f"{name} must be a number or one per stage, got {value!r}")
