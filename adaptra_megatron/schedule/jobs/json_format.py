# SPDX-License-Identifier: Apache-2.0
"""Reads the costs of a job from JSON: those of one pipeline, and what its replicas add."""

from __future__ import annotations

from typing import Any

from adaptra_megatron.schedule.costs import CostError, Costs, is_number
from adaptra_megatron.schedule.costs_json import (
    costs_from_json,
    is_per_micro_batch,
    micro_batches_from_json,
    table_from_json,
)
from adaptra_megatron.schedule.jobs.costs import MOST_REPLICAS, JobCosts, LinkChange, Override, job_costs

_JOB_FIELDS = ("replicas", "ranks_per_stage", "gradient_sync_s", "message_bytes")


def job_costs_from_json(document: Any) -> JobCosts:
    """Costs of a job from the parsed JSON document of `costs_from_json`, with these optional fields more:

    `replicas`, either a number or `{"count": 256, "overrides": [{"replicas": [3, "8-15"], "links": [...], "forward_s":
    ..., "slow_stages": [{"stage": 5, "factor": 1.3}]}]}`; `ranks_per_stage`; `gradient_sync_s`, one number or one per
    stage; `message_bytes`. An override without `replicas` is one of all; what a link in it does not say stays as it
    is. Raises CostError for a missing or unknown field or a wrong value.
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
    return job_costs(
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
    slow = {entry["stage"]: entry["factor"] for entry in _objects(entry, "slow_stages", {"stage", "factor"}, set())}
    if not all(isinstance(number, int) for number in (*slow, *(end for ends in links for end in ends))):
        raise CostError("stages of an override of replicas must be whole numbers")
    return Override(
        replicas=replica_numbers(entry["replicas"]) if "replicas" in entry else None,
        links=links,
        tables={
            name: table_from_json(name, value, base.stages, base.chunks)
            for name, value in given.items()
            if not is_per_micro_batch(value)
        },
        micro_batches={
            name: micro_batches_from_json(name, value, base)
            for name, value in given.items()
            if is_per_micro_batch(value)
        },
        slow_stages=slow,
    )


def replica_numbers(value: Any) -> tuple[int, ...]:
    """Numbers from a list such as `[3, "8-15"]`. Raises CostError for what is no number and no range."""
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
