# SPDX-License-Identifier: Apache-2.0
"""Jobs, hosts and orders, spoilt, into the native routing planner and simulator: they answer, or raise an error."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from adaptra_megatron.schedule import _native
from fuzz.mutations import spoil_list
from fuzz.schedules import COUNTS, REFUSALS, SECONDS, spoilt_orders

_BUDGETS = (0, 1, 1000, 30_000)


def case(random: Random, deadline_s: float) -> int:
    """One job, mostly spoilt; a plan of it, and the replay of spoilt hosts and orders."""
    fields = _fields(random)
    good = random.random() < 0.5
    if not good:
        _spoil(random, fields)
    try:
        problem = _native.RoutedProblem(**fields)
    except REFUSALS:
        assert not good, "a job that can be was refused"
        return 1
    split, budget = random.random() < 0.5, random.choice(_BUDGETS)
    planned = _native.plan_routed(problem, split, [], random.choice((0.0, 0.1)), budget)
    if good:
        replayed = _native.replay_routed(problem, planned["hosts"], planned["orders"])
        assert replayed["period_s"] == planned["period_s"], f"{replayed['period_s']}, not {planned['period_s']}"
        assert planned["period_s"] >= planned["bound_s"] * (1 - 1e-9), f"below the bound {planned['bound_s']}"
    hosts: list[Any] = list(planned["hosts"])
    for _ in range(random.choice((0, 1, 3))):
        spoil_list(random, hosts, random.choice((*COUNTS, 0, 0)))
    for call in (
        lambda: _native.replay_routed(problem, hosts, spoilt_orders(random, planned["orders"])),
        lambda: _native.plan_routed(problem, split, hosts, random.choice(SECONDS), budget),
        lambda: _native.routed_bound(problem, split),
    ):
        try:
            call()
        except REFUSALS:
            continue
    return 4


def _fields(random: Random) -> dict[str, Any]:
    replicas, stages, micro_batches = random.randrange(1, 5), random.randrange(1, 5), random.randrange(1, 7)
    cells = replicas * stages

    def seconds(count: int) -> list[float]:
        return [random.choice((0.0, 1.0, random.random())) for _ in range(count)]

    alive = random.randrange(replicas)
    live = [cell // stages == alive or random.random() < 0.8 for cell in range(cells)]
    pairs = [
        (a, b)
        for a in range(cells)
        for b in range(cells)
        if abs(a % stages - b % stages) == 1 and random.random() < 0.1
    ]
    return {
        "replicas": replicas,
        "stages": stages,
        "micro_batches": micro_batches,
        "per_cell": seconds(4 * cells),
        "factor": random.choice(([], seconds(4 * cells * micro_batches))),
        "whole_given": random.random() < 0.5,
        "live": live,
        "cap": [random.choice((math.inf, 1.0, 2.5)) for _ in range(cells)],
        "released": [random.choice((0.0, 1.0, random.random(), -2.0)) for _ in range(cells)],
        "own_latency": seconds(2 * cells),
        "own_occupancy": seconds(2 * cells),
        "given": [(*ends, *seconds(2)) for ends in pairs],
        "sync": seconds(stages),
        "staggered": random.random() < 0.3,
        "pinned": [all(live[stage::stages]) and random.random() < 0.3 for stage in range(stages)],
    }


def _spoil(random: Random, fields: dict[str, Any]) -> None:
    name = random.choice([name for name in fields if name != "whole_given" and name != "staggered"])
    if isinstance(fields[name], int):
        fields[name] = random.choice((*COUNTS, fields[name] + 1))
        return
    value: Any = random.choice(SECONDS)
    if name in ("live", "pinned"):
        value = random.random() < 0.5
    if name == "given":
        value = (random.choice(COUNTS), random.randrange(9), value, random.choice(SECONDS))
    spoil_list(random, fields[name], value)
