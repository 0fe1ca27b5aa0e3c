# SPDX-License-Identifier: Apache-2.0
"""Find how much shorter plans could be with room for more activations per stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from adaptra_megatron.schedule.costs import Costs

WORTH_NAMING = 0.02
"""Least relative gain in iteration time for a higher cap to be listed."""
_ENOUGH = 0.01
"""Tolerance to the iteration time without a cap: caps are not raised further once within it."""


class Bought(NamedTuple):
    """One cap for all stages and the time of the plan within it."""

    max_in_flight: int
    makespan_s: float


def more_memory(
    costs: Costs,
    makespan_s: Callable[[Costs], float],
    *,
    least_gain: float = WORTH_NAMING,
    within_s: float | None = None,
) -> tuple[Bought, ...]:
    """Return caps above those of `costs`, ascending, each of which shortens the iteration by `least_gain` or more.

    `makespan_s` plans under the given caps and returns the seconds of an iteration. Caps are tried in growing steps up
    to the number of micro-batches in all chunks, or until no cap gains 1%. The result is empty if a stage has no cap.
    `within_s`: seconds of a known plan within the caps of `costs`. A quick plan for a higher cap is ignored if it is
    slower than that.
    """
    caps = [cap for cap in costs.max_in_flight if cap is not None]
    if len(caps) < costs.stages:
        return ()
    most = costs.micro_batches * costs.chunks
    within_s = makespan_s(costs) if within_s is None else within_s
    unlimited_s = makespan_s(capped(costs, most))
    found: list[Bought] = []
    for cap in _higher(int(max(caps)), most):
        if within_s <= (1.0 + _ENOUGH) * unlimited_s:
            break
        seconds = makespan_s(capped(costs, cap))
        if seconds <= (1.0 - least_gain) * within_s:
            found.append(Bought(cap, seconds))
            within_s = seconds
    return tuple(found)


def capped(costs: Costs, max_in_flight: float) -> Costs:
    """Return `costs` with one cap for all stages. Raises CostError for a cap below 1."""
    return replace(costs, max_in_flight=(max_in_flight,) * costs.stages)


def _higher(cap: int, most: int) -> Iterator[int]:
    step = 1
    while cap < most:
        cap = min(cap + step, most)
        yield cap
        step = max(1, cap // 8)
