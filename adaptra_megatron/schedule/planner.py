# SPDX-License-Identifier: Apache-2.0
"""Finds the schedule of least makespan within the activation caps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.bounds import LowerBound, bound_from_native
from adaptra_megatron.schedule.costs import CostError, Costs
from adaptra_megatron.schedule.native import decode_orders, problem_from_costs
from adaptra_megatron.schedule.simulator import peak_in_flight, require_room_for_chunks

ACTIONS_PER_SECOND = 50_000_000
"""Simulated actions per second that a deadline is converted with: what one slow core does, so plans are repeatable."""

# Simulations of the whole schedule that a plan may take, and what long pipelines get more, because with few
# micro-batches most of their time is filling and draining. On one core: 5 ms for 8 stages and 32 micro-batches, 50 ms
# for 16 and 128, 0.5 s for 64 and 256.
_PASSES = 340
_ACTIONS_PER_STAGE_SQUARED = 4_000


class PlanError(CostError):
    """No schedule fits the caps: the message names the stage, what is needed and what is given."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule, what it takes, and how far it may be from the best one."""

    schedule: Schedule
    makespan_s: float
    lower_bound: LowerBound
    peak_in_flight: tuple[float, ...]

    @property
    def gap(self) -> float:
        """How much longer than the lower bound: 0.02 is 2%."""
        return self.makespan_s / self.lower_bound.seconds - 1.0 if self.lower_bound.seconds > 0.0 else 0.0


def plan(costs: Costs, *, deadline_s: float | None = None, split: bool = True) -> Plan:
    """The best schedule found for `costs`; among equally fast ones, the one that holds the fewest activations.

    Deterministic: the work is limited by a number of simulated actions, never by a clock. `deadline_s` sets that
    number to `deadline_s * ACTIONS_PER_SECOND`; at least one schedule is always made. With `split` False each backward
    is whole, for models whose backward cannot be split. Raises PlanError if no schedule fits the caps.
    """
    try:
        require_room_for_chunks(costs)
    except CostError as error:
        raise PlanError(f"no schedule fits the cap: {error}") from error
    if deadline_s is None:
        actions = costs.stages * costs.chunks * costs.micro_batches * (3 if split else 2)
        budget = max(_PASSES * actions, _ACTIONS_PER_STAGE_SQUARED * costs.stages**2)
    else:
        if not 0.0 <= deadline_s < math.inf:
            raise CostError(f"deadline_s must be seconds >= 0, got {deadline_s!r}")
        budget = int(deadline_s * ACTIONS_PER_SECOND)
    found = _native.plan(problem_from_costs(costs), split, budget)
    assert math.isfinite(found["makespan_s"])
    schedule = decode_orders(found["orders"], costs)
    return Plan(
        schedule=schedule,
        makespan_s=found["makespan_s"],
        lower_bound=bound_from_native((found["bound_s"], found["bound_kind"], found["bound_place"]), costs),
        peak_in_flight=peak_in_flight(schedule, costs.released_at_backward_input),
    )
