# SPDX-License-Identifier: Apache-2.0
"""The native core refuses numbers that would be indices of nothing. Fuzzed in tests/fuzz/schedules.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from adaptra_megatron.schedule import _native

# 2 stages, 2 chunks, 3 micro-batches: codes from 0 to 47.
GOOD: dict[str, Any] = {
    "stages": 2,
    "chunks": 2,
    "micro_batches": 3,
    **{name: [1.0] * 4 for name in ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")},
    "stage_of": [0, 1, 1, 0],
    "links": [(0, 1, 0.0, 0.0, False), (1, 0, 0.0, 0.0, True)],
    "cap": [math.inf] * 2,
    "released": [0.5, -2.0],
    "shared_queue": True,
}


def problem(**changed: object) -> _native.Problem:
    return _native.Problem(**(GOOD | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"stages": 0},
        {"stages": 3},
        {"chunks": -2},
        {"micro_batches": 0},
        {"micro_batches": 1 << 29},
        {"stages": 1 << 30, "chunks": 1 << 30},
        {"forward_s": [1.0] * 3},
        {"backward_input_s": [1.0] * 3},
        {"backward_weight_s": [1.0] * 5},
        {"backward_s": []},
        {"backward_s": [1.0, 1.0, 1.0, math.nan]},
        {"stage_of": [0, 1, 0]},
        {"stage_of": [0, 1, 1, 1]},
        {"stage_of": [0, 1, 2, 0]},
        {"stage_of": [0, 1, -1, 0]},
        {"links": [(0, 1, 0.0, 0.0, False)]},
        {"links": [(0, 1, 0.0, 0.0, False), (1, 2, 0.0, 0.0, True)]},
        {"links": [(0, 1, 0.0, 0.0, False), (1, 1, 0.0, 0.0, True)]},
        {"links": [(0, 1, 0.0, 0.0, False), (1, 0, 0.0, 0.0, True), (1, 0, 0.0, 0.0, True)]},
        {"links": [(0, 1, 0.0, 0.0, False), (1, 0, 0.0, -1.0, True)]},
        {"cap": [math.inf]},
        {"cap": [math.inf, math.nan]},
        {"cap": [0.5, 1.0]},
        {"forward_s": [1.0, 1.0, 1.0, math.nan]},
        {"forward_s": [1.0, 1.0, 1.0, math.inf]},
        {"forward_s": [1e308] * 4},
        {"backward_weight_s": [1.0, -1.0, 1.0, 1.0]},
        {"released": [0.5]},
        {"released": [0.5, 1.5]},
        {"released": [0.5, math.nan]},
        {"released": [0.5, -math.inf]},
    ],
)
def test_problems_that_cannot_be_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        problem(**changed)


ENCODED = _native.EncodedOrders
REPLAYS: dict[str, Callable[[list[list[int]]], object]] = {
    "replay": lambda orders: _native.replay(problem(), ENCODED(orders)),
    "launch_ranks": lambda orders: _native.launch_ranks(problem(), orders),
}


@pytest.mark.parametrize("replay", REPLAYS)
def test_orders_that_do_not_fit_the_problem_are_refused(replay: str) -> None:
    run = REPLAYS[replay]
    run([[0], []])
    for orders in ([[48], []], [[], [1 << 30]], [[-17], []], [[-(1 << 31)], []], [[0]], [[0], [0], [0]], []):
        with pytest.raises(ValueError, match="orders has|codes from"):
            run(orders)
    if replay == "launch_ranks":  # what has calls is replayed as a program that blocks
        with pytest.raises(ValueError, match="only a forward with a backward right behind it"):
            run([[4], []])
        with pytest.raises(ValueError, match="only a forward with a backward right behind it"):
            run([[4, 3], []])
        with pytest.raises(ValueError, match="codes from -1 to 0"):
            run([[-1], [0]])


def test_released_fractions_are_as_many_as_orders() -> None:
    with pytest.raises(ValueError, match="one entry per order"):
        _native.peak_in_flight([[0], [0]], [0.5])


def test_a_budget_is_not_negative() -> None:
    with pytest.raises(ValueError, match="budget"):
        _native.plan(problem(), True, -1)
