# SPDX-License-Identifier: Apache-2.0
"""Problems and orders, spoilt, into the native planner and simulator: they answer, or raise an error of Python's."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from adaptra_megatron.schedule import _native
from fuzz.mutations import spoil_list

REFUSALS = (ValueError, TypeError, IndexError, OverflowError, MemoryError)
_BUDGETS = (0, 1, 1000, 30_000, 200_000)
SECONDS = (0.0, 5e-324, 1e-9, 0.3, 1.0, 1e9, 1e300, math.inf, math.nan, -1.0, -0.0)
COUNTS = (0, 1, 2, 3, -1, 1 << 12, (1 << 31) - 1, 1 << 31, 1 << 63, -(1 << 31))
CODES = (0, 1, 2, 3, 4, -1, -2, -15, -16, -17, (1 << 31) - 1, -(1 << 31), 1 << 20)

Orders = list[list[int]]


def case(random: Random, deadline_s: float) -> int:
    """One problem, mostly spoilt, and some orders for it."""
    fields = _fields(random)
    good = random.random() < 0.5
    if not good:
        for _ in range(random.choice((1, 1, 2, 4))):
            _spoil(random, fields)
    try:
        problem = _native.Problem(**fields)
    except REFUSALS:
        assert not good, "a problem that can be was refused"
        return 1
    calls = _calls(random, problem, fields)
    for call in calls:
        try:
            call()
        except REFUSALS:
            continue
    if good:
        _check_plan(random, problem)
    return 1 + len(calls)


def _calls(random: Random, problem: Any, fields: dict[str, Any]) -> list[Callable[[], object]]:
    budget = random.choice((*_BUDGETS, -1, -(1 << 63), 1 << 64))
    orders = spoilt_orders(random, _native.plan(problem, True, 1000)["orders"])
    programs = [[code if random.random() < 0.8 else -random.randrange(1, 17) for code in order] for order in orders]
    encoded = [_native.EncodedOrders(each) for each in (orders, programs) if _fits(each)]
    many: list[Callable[[], object]] = [
        lambda: _native.launch_ranks(problem, orders),
        lambda: _native.plan(problem, random.random() < 0.5, budget),
        lambda: _native.dispatch(problem),
        lambda: _native.lower_bound(problem),
        lambda: _native.peak_in_flight(orders, [random.choice(SECONDS)] * random.choice((len(orders), 1))),
        lambda: _native.actions(problem, random.choice((0, *COUNTS)), orders[0], tuple, (1, 2, 3, 4)),  # type: ignore
    ]
    return many + [lambda each=each: _native.replay(problem, each).finish_s for each in encoded]


def _check_plan(random: Random, problem: Any) -> None:
    """The plan of a problem that can be takes as long as it says, and no less than its bound."""
    planned = _native.plan(problem, random.random() < 0.5, random.choice(_BUDGETS))
    if math.isfinite(planned["makespan_s"]):
        replayed = _native.replay(problem, _native.EncodedOrders(planned["orders"])).makespan_s
        assert math.isclose(replayed, planned["makespan_s"], rel_tol=1e-9), f"{replayed}, not {planned['makespan_s']}"
        assert planned["makespan_s"] >= planned["bound_s"] * (1 - 1e-9), f"below the bound {planned['bound_s']}"


def _fields(random: Random) -> dict[str, Any]:
    stages, chunks, micro_batches = random.randrange(1, 7), random.randrange(1, 4), random.randrange(1, 11)

    def seconds() -> float:
        return random.choice((0.0, 1.0, random.random(), random.random() * 1e-3))

    stage_of = [stage for stage in range(stages) for _ in range(chunks)]
    random.shuffle(stage_of)
    links = sorted({pair for ends in pairwise(stage_of) for pair in (ends, ends[::-1]) if ends[0] != ends[1]})
    tables = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")
    return {
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro_batches,
        **{name: [seconds() for _ in range(stages * chunks)] for name in tables},
        "stage_of": stage_of,
        "links": [(*ends, seconds(), seconds(), random.random() < 0.5) for ends in links],
        "cap": [random.choice((math.inf, 1.0, 2.5, float(chunks * stages))) for _ in range(stages)],
        "released": [random.choice((0.0, 1.0, random.random(), -3.0 * random.random())) for _ in range(stages)],
        "shared_queue": random.random() < 0.3,
    }


def _spoil(random: Random, fields: dict[str, Any]) -> None:
    name = random.choice(list(fields))
    if isinstance(fields[name], int):
        fields[name] = random.choice((*COUNTS, fields[name] + 1))
        return
    value: Any = random.choice(COUNTS if name == "stage_of" else SECONDS)
    if name == "links":
        ends = random.choice(COUNTS), random.randrange(3)
        value = (*ends, value, random.choice(SECONDS), random.random() < 0.5)
    spoil_list(random, fields[name], value)


def spoilt_orders(random: Random, orders: Orders) -> Orders:
    corrupted: list[Any] = [list(order) for order in orders] or [[0]]
    for _ in range(random.choice((0, 1, 1, 3, 9))):
        if random.random() < 0.1:
            spoil_list(random, corrupted, [random.choice(CODES)])
        elif corrupted:
            spoil_list(random, random.choice(corrupted), random.choice((*CODES, random.randrange(200))))
    return corrupted or [[]]


def _fits(orders: Orders) -> bool:
    """Return whether every number is one that EncodedOrders takes at all."""
    return all(-(1 << 31) <= code < 1 << 31 for order in orders for code in order)
