# SPDX-License-Identifier: Apache-2.0
"""How fast any schedule could possibly be."""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.native import problem_from_costs


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No schedule within the caps, split or not, in whatever order, takes less than `seconds`."""

    seconds: float
    kind: str
    """What binds: "stage" (its work) or "link" (its occupancy)."""
    where: str
    """The stage or the directed link that binds, such as "stage 3" or "link 3->4"."""


def lower_bound(costs: Costs) -> LowerBound:
    """The largest of the bounds we can prove."""
    return bound_from_native(_native.lower_bound(problem_from_costs(costs)), costs)


def bound_from_native(found: tuple[float, str, int], costs: Costs) -> LowerBound:
    """Names the place of a native bound."""
    seconds, kind, place = found
    if kind != "link":
        return LowerBound(seconds=seconds, kind=kind, where=f"stage {place}")
    source = place // 2
    target = (source + (-1 if place % 2 else 1)) % costs.stages
    return LowerBound(seconds=seconds, kind=kind, where=f"link {source}->{target}")
