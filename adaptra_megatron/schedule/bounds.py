# SPDX-License-Identifier: Apache-2.0
"""Prove lower bounds on the time of any schedule.

All micro-batches cost the same, so only counts matter: the m-th F of a virtual stage is whichever starts m-th there. It
needs m activations to have arrived, so m forwards of the previous virtual stage must have ended, and m messages must
have passed one after the other over the link. The same holds for B and W. A whole backward equals I and W together, but
sends and releases later, so bounds of split schedules hold for all schedules. By induction this gives

- heads: the earliest start of the m-th F, B and W of each virtual stage;
- tails, by the same induction backwards in time: the least time from the start of the m-th from last to the end.
- A cap makes the m-th F wait until enough B and W of its stage have ended to leave room for it, each of which has a
  round trip of its own. So there is one round trip for every cap of micro-batches, also at the beginning and end of the
  iteration. With several chunks, micro-batches pass in waves: as many at a time as fit with all that each holds.
- A stage does one action at a time and a link carries one message at a time. Jackson's preemptive schedule of all of
  them with their heads and tails (Carlier, "The one-machine sequencing problem", 1982) bounds every real one.

The largest value over all stages and links is the bound. The inductions are spelled out in csrc/schedule/bounds.cpp,
the waves in waves.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.native import problem_from_costs


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """Proven bound: no schedule within the caps, split or not, in any order, takes less than `seconds`."""

    seconds: float
    kind: str
    """Binding resource: "stage" (its work, or the way to it and back), "link" (its occupancy) or "memory" (a cap)."""
    where: str
    """Name of the binding stage or directed link, such as "stage 3" or "link 3->4"."""

    def gap_of(self, makespan_s: float) -> float:
        """Return the relative gap of a makespan to the bound: 0.02 is 2%. Negative only if a cap is exceeded."""
        return makespan_s / self.seconds - 1.0 if self.seconds > 0.0 else 0.0


def lower_bound(costs: Costs) -> LowerBound:
    """Return the largest provable lower bound. Takes about 10 ms for 64 stages and 256 micro-batches."""
    return bound_from_native(_native.lower_bound(problem_from_costs(costs)), costs)


def bound_from_native(found: tuple[float, str, int], costs: Costs) -> LowerBound:
    """Convert a native bound, with the name of its place."""
    seconds, kind, place = found
    if kind != "link":
        return LowerBound(seconds=seconds, kind=kind, where=f"stage {place}")
    source, target = costs.placement.links[place]
    return LowerBound(seconds=seconds, kind=kind, where=f"link {source}->{target}")
