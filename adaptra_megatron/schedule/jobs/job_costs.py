# SPDX-License-Identifier: Apache-2.0
"""Define the costs of a job's iteration: data-parallel pipelines (replicas) that run one plan, each with its own costs.

Replicas meet once per iteration: the gradient synchronisation of a stage starts when the last replica has ended its
last action there. The ranks of a stage that share its work (tensor and context parallel peers) act as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from adaptra_megatron.schedule.costs import (
    CostError,
    Costs,
    LinkCost,
    PerChunk,
    PerMicroBatch,
    costs_from_json,
    is_number,
    is_per_micro_batch,
    micro_batches_from_json,
    table_from_json,
)

MOST_REPLICAS = 1 << 20


class LinkChange(NamedTuple):
    """Changed costs of a directed link; None: unchanged."""

    latency_s: float | None = None
    occupancy_s: float | None = None
    rendezvous: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """Changed costs of some replicas."""

    replicas: tuple[int, ...] | None = None
    """Numbers of the replicas; None: all."""
    links: Mapping[tuple[int, int], LinkChange] = field(default_factory=dict)
    tables: Mapping[str, PerChunk] = field(default_factory=dict)
    """New seconds per stage and chunk, by the names of `Costs.tables`."""
    micro_batch_factors: Mapping[str, PerMicroBatch] = field(default_factory=dict)
    """Factors of micro-batches on `tables`; a table without factors is the same for all micro-batches."""
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    """Factor on all seconds of a stage: 1.3 for a GPU that takes 30% longer."""

    def applied_to(self, costs: Costs) -> Costs:
        """Return `costs` with these changes. Raises CostError for an unknown stage or link."""
        tables = costs.tables()
        if unknown := sorted(self.tables.keys() - tables.keys()):
            raise CostError(f"an override has {unknown[0]}, the costs have {', '.join(tables)}")
        factors = {name: table for name, table in costs.micro_batch_factors.items() if name not in self.tables}
        links = dict(costs.links)
        for ends, change in self.links.items():
            given = {name: value for name, value in change._asdict().items() if value is not None}
            links[ends] = costs.link(*ends)._replace(**given)
        changes: dict[str, Any] = {**self.tables, "micro_batch_factors": {**factors, **self.micro_batch_factors}}
        costs = dataclasses.replace(costs, links=links, **changes)
        tables = {**tables, **self.tables}
        for stage, factor in self.slow_stages.items():
            if not 0 <= stage < costs.stages:
                raise CostError(f"slow stage {stage} is none of the stages 0..{costs.stages - 1}")
            if not is_number(factor) or factor <= 0:
                raise CostError(f"factor of slow stage {stage} must be a number above 0, got {factor!r}")
            for name, table in tables.items():
                slow = tuple(factor * seconds for seconds in table[stage])
                tables[name] = (*table[:stage], slow, *table[stage + 1 :])
        return costs.with_tables(tables) if self.slow_stages else costs


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """Replicas with equal costs."""

    replicas: tuple[int, ...]
    costs: Costs

    def __str__(self) -> str:
        return f"replica{'s' if len(self.replicas) > 1 else ''} {ranges(self.replicas)}"


@dataclass(frozen=True, repr=False)
class JobCosts:
    """Costs of one iteration of a job: `replicas` pipelines, which cost `base` with `overrides` in their order. A
    pipeline is a job of one replica.

    Raises CostError at construction for counts below 1 and for unknown replicas, stages and links.
    """

    base: Costs
    """Costs of a replica without overrides."""
    _: KW_ONLY
    replicas: int = 1
    overrides: Sequence[Override] = ()
    ranks_per_stage: int = 1
    """Ranks that share the work of one stage of one replica: tensor x context parallel size."""
    gradient_sync_s: Sequence[float] = ()
    """Per stage: seconds of the collective over all replicas at the end of the iteration. Empty: 0 for all."""
    message_bytes: int | None = None
    """Bytes of one activation or gradient on a link; None: unknown. Needed to turn a bandwidth into an occupancy."""
    groups: tuple[ReplicaGroup, ...] = field(init=False, compare=False)
    """Groups of equal replicas, ordered by first replica; every replica is in exactly one."""

    def __post_init__(self) -> None:
        nbytes = 1 if self.message_bytes is None else self.message_bytes
        counts = {"replicas": self.replicas, "ranks_per_stage": self.ranks_per_stage, "message_bytes": nbytes}
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise CostError(f"{name} must be a whole number of at least 1, got {count!r}")
        if self.replicas > MOST_REPLICAS:
            raise CostError(f"replicas must be at most {MOST_REPLICAS}, got {self.replicas}")
        sync_s = tuple(self.gradient_sync_s) or (0.0,) * self.base.stages
        if len(sync_s) != self.base.stages:
            raise CostError(f"gradient_sync_s has {len(sync_s)} entries for {self.base.stages} stages")
        for stage, seconds in enumerate(sync_s):
            if not is_number(seconds) or seconds < 0:
                raise CostError(f"gradient_sync_s of stage {stage} must be seconds >= 0, got {seconds!r}")
        object.__setattr__(self, "gradient_sync_s", sync_s)
        object.__setattr__(self, "overrides", tuple(self.overrides))
        object.__setattr__(self, "groups", _groups(self.base, self.replicas, self.overrides))

    def __repr__(self) -> str:
        base = self.base
        return (
            f"<JobCosts: {base.stages} stages x {base.chunks} chunks, {base.micro_batches} micro-batches, "
            f"{self.replicas} replicas of {len(self.groups)} kinds>"
        )

    @property
    def ranks(self) -> int:
        return self.base.stages * self.replicas * self.ranks_per_stage

    @property
    def is_one_pipeline(self) -> bool:
        """Return whether the job is a single pipeline without gradient synchronisation."""
        return self.replicas == 1 and not any(self.gradient_sync_s)


_OWN = {"forward_s", "backward_input_s", "backward_weight_s", "backward_s", "links", "micro_batch_factors"}
"""Fields of `Costs` in which replicas may differ."""


def job_of(pipelines: Sequence[Costs], *, gradient_sync_s: Sequence[float] = ()) -> JobCosts:
    """Return the job whose replicas cost what `pipelines` do. Raises CostError where these differ in what is shared."""
    base, overrides = pipelines[0], []
    ends = {ends for costs in pipelines for ends in costs.links}
    for replica, costs in enumerate(pipelines[1:], start=1):
        odd = [name for name in vars(costs) if name not in _OWN and getattr(costs, name) != getattr(base, name)]
        if odd or costs.tables().keys() != base.tables().keys():
            raise CostError(f"{'backward_s' if not odd else odd[0]} of replica {replica} is unlike that of replica 0")
        overrides.append(
            Override(
                replicas=(replica,),
                links={each: LinkChange(*cost) for each in ends if (cost := costs.link(*each)) != base.link(*each)},
                tables=costs.tables(),
                micro_batch_factors=costs.micro_batch_factors,
            )
        )
    return JobCosts(base, replicas=len(pipelines), overrides=overrides, gradient_sync_s=gradient_sync_s)


def worst_costs(groups: Sequence[ReplicaGroup]) -> Costs:
    """Return the slowest costs of each stage and link over all `groups`. No replica is slower; possibly none is as
    slow.
    """
    all_costs = [group.costs for group in groups]

    def worst(name: str) -> PerChunk:
        rows = zip(*(getattr(costs, name) for costs in all_costs), strict=True)
        return tuple(tuple(map(max, zip(*row, strict=True))) for row in rows)

    links = {
        ends: [costs.link(*ends) for costs in all_costs] for ends in sorted({e for c in all_costs for e in c.links})
    }
    worst_tables = {name: worst(name) for name in all_costs[0].tables()}
    found = dataclasses.replace(
        all_costs[0].with_tables(worst_tables),
        links={
            ends: LinkCost(
                max(cost.latency_s for cost in costs),
                max(cost.occupancy_s for cost in costs),
                any(cost.rendezvous for cost in costs),
            )
            for ends, costs in links.items()
        },
    )
    varied = {name for costs in all_costs for name in costs.micro_batch_factors}
    return found.with_micro_batches({name: _worst_micro_batches(name, all_costs) for name in sorted(varied)})


def _worst_micro_batches(name: str, all_costs: Sequence[Costs]) -> PerMicroBatch:
    def worst(stage: int, chunk: int) -> tuple[float, ...]:
        return tuple(map(max, zip(*(costs.micro_batch_s(name, stage, chunk) for costs in all_costs), strict=True)))

    stages, chunks = range(all_costs[0].stages), range(all_costs[0].chunks)
    return tuple(tuple(worst(stage, chunk) for chunk in chunks) for stage in stages)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `0-2, 17`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _groups(base: Costs, replicas: int, overrides: Sequence[Override]) -> tuple[ReplicaGroup, ...]:
    changes: list[tuple[int, ...]] = [()] * replicas
    for number, override in enumerate(overrides):
        for replica in range(replicas) if override.replicas is None else sorted(set(override.replicas)):
            if not 0 <= replica < replicas:
                raise CostError(
                    f"an override names replica {replica}, but there are {replicas} (0..{replicas - 1}): name one of "
                    "those, or raise the count of replicas"
                )
            changes[replica] += (number,)
    members: dict[tuple[int, ...], list[int]] = {}
    for replica, numbers in enumerate(changes):
        members.setdefault(numbers, []).append(replica)
    # Different overrides may come to the same costs.
    equal: dict[tuple[Any, ...], tuple[Costs, list[int]]] = {}
    for numbers, found in members.items():
        costs = base
        for number in numbers:
            costs = overrides[number].applied_to(costs)
        factors = tuple(sorted(costs.micro_batch_factors.items()))
        key = (*costs.tables().values(), tuple(sorted(costs.links.items())), factors)
        equal.setdefault(key, (costs, []))[1].extend(found)
    groups = (ReplicaGroup(replicas=tuple(sorted(found)), costs=costs) for costs, found in equal.values())
    return tuple(sorted(groups, key=lambda group: group.replicas[0]))


_JOB_FIELDS = ("replicas", "ranks_per_stage", "gradient_sync_s", "message_bytes")


def job_costs_from_json(document: Any) -> JobCosts:
    """Read the costs of a job from the parsed JSON document of `costs_from_json`, with these additional optional
    fields.

    `replicas`, either a number or `{"count": 256, "overrides": [{"replicas": [3, "8-15"], "links": [...], "forward_s":
    ..., "slow_stages": [{"stage": 5, "factor": 1.3}]}]}`; `ranks_per_stage`; `gradient_sync_s`, one number or one per
    stage; `message_bytes`. An override without `replicas` applies to all; fields that it does not name stay as they
    are. Raises CostError for a missing or unknown field or a wrong value.
    """
    if not isinstance(document, dict):
        raise CostError(f"costs must be a JSON object, got {type(document).__name__}")
    base = costs_from_json({name: value for name, value in document.items() if name not in _JOB_FIELDS})
    replicas = document.get("replicas", 1)
    if not isinstance(replicas, dict):
        replicas = {"count": replicas}
    _require_known(replicas, {"count", "overrides"}, "replicas")
    if "count" not in replicas:
        raise CostError("replicas needs a 'count'")
    sync_s = document.get("gradient_sync_s", ())
    if is_number(sync_s):
        sync_s = (sync_s,) * base.stages
    if not isinstance(sync_s, (list, tuple)):
        raise CostError(f"gradient_sync_s must be seconds, or a list with one number per stage, got {sync_s!r}")
    overrides = replicas.get("overrides", [])
    if not isinstance(overrides, list):
        raise CostError(f"overrides of replicas must be a list of objects, got {overrides!r}")
    return JobCosts(
        base,
        replicas=replicas["count"],
        overrides=[_override_from_json(entry, base) for entry in overrides],
        ranks_per_stage=document.get("ranks_per_stage", 1),
        gradient_sync_s=sync_s,
        message_bytes=document.get("message_bytes"),
    )


def _override_from_json(entry: Any, base: Costs) -> Override:
    if not isinstance(entry, dict):
        raise CostError(f"an override of replicas must be an object, got {entry!r}")
    _require_known(entry, {"replicas", "links", "slow_stages", *base.tables()}, "an override of replicas")
    links: dict[tuple[int, int], LinkChange] = {}
    for link in _objects(entry, "links", {"from", "to"}, {"latency_s", "occupancy_s"}):
        links[link["from"], link["to"]] = LinkChange(link.get("latency_s"), link.get("occupancy_s"))
    given = {name: entry[name] for name in base.tables() if name in entry}
    differ = {name: value for name, value in given.items() if is_per_micro_batch(value)}
    varied = base.with_micro_batches({name: micro_batches_from_json(name, differ[name], base) for name in differ})
    slow = {entry["stage"]: entry["factor"] for entry in _objects(entry, "slow_stages", {"stage", "factor"}, set())}
    if not all(isinstance(number, int) for number in (*slow, *(end for ends in links for end in ends))):
        raise CostError("stages of an override of replicas must be whole numbers")
    return Override(
        replicas=replica_numbers(entry["replicas"]) if "replicas" in entry else None,
        links=links,
        tables={
            name: varied.tables()[name] if name in differ else table_from_json(name, value, base.stages, base.chunks)
            for name, value in given.items()
        },
        micro_batch_factors={name: varied.micro_batch_factors[name] for name in differ},
        slow_stages=slow,
    )


def replica_numbers(value: Any) -> tuple[int, ...]:
    """Parse replica numbers such as `[3, "8-15"]`. Raises CostError for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise CostError(f'replicas of an override must be a list such as [3, "8-15"], got {value!r}')
    numbers: list[int] = []
    for entry in value:
        first, _, last = entry.partition("-") if isinstance(entry, str) else (str(entry), "", "")
        last = last or first
        if isinstance(entry, bool) or not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise CostError(f'{entry!r} is no replica and no range of replicas such as "8-15"')
        if int(last) >= MOST_REPLICAS:
            raise CostError(f"replica {last} is beyond the {MOST_REPLICAS} that a job may have")
        numbers += range(int(first), int(last) + 1)
    return tuple(numbers)


def _objects(entry: dict[str, Any], name: str, needed: set[str], optional: set[str]) -> list[dict[str, Any]]:
    found = entry.get(name, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) and needed <= set(item) for item in found):
        raise CostError(f"{name} of an override must be a list of objects with {' and '.join(sorted(needed))}")
    for item in found:
        _require_known(item, needed | optional, f"{name} of an override")
    return found


def _require_known(entry: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise CostError(f"unknown field {unknown[0]!r} in {where}; known are {', '.join(sorted(known))}")
