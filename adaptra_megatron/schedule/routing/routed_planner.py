# SPDX-License-Identifier: Apache-2.0
"""Find which cells run which micro-batches, and in which order, so that an iteration of the job is shortest.

Each stage's work is spread over its live cells in proportion to their speed. Moving a micro-batch has a cost, so
several shares are tried: from the fewest moves (only from dead cells, then the excess of the slowest stage) up to even
loads, and dropping the replicas that have a dead cell. For every share, actions are dispatched in order of time:
backwards before forwards before weight gradients, by number of the micro-batch, a cell's own first (ReCycle's adaptive
pipelining with decoupled backwards). The best shares are tried with other dispatch rules (1F1B's among them, with fewer
and more activations held). They are then improved by priorities from the work remaining after each action, and by
moving single micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.schedule.planner import ACTIONS_PER_SECOND
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_plans import RoutedSchedule, Routing, unrouted
from adaptra_megatron.schedule.routing.routed_simulator import (
    RoutedSimulation,
    decode_hosts,
    decode_orders,
    encode_hosts,
    problem_from_routed,
    routed_simulation,
)

LEAST_GAIN = 0.02
"""Least relative gain over the present routing for a change."""

_PASSES = 4_000
"""Default number of dispatches of a whole job."""
_MOST_ACTIONS = 4_000_000
"""Least number of simulated actions by default: about 0.5 s on one core."""


@dataclass(frozen=True, kw_only=True)
class RoutedPlan:
    """A routing with its orders, its iteration time, and the lower bound."""

    simulation: RoutedSimulation
    lower_bound: LowerBound
    present_s: float | None
    """Period of the present routing in the first pass of planning; None if that has a dead cell."""
    kept: bool
    """True if the result is the present routing, since no other gains enough."""

    @property
    def schedule(self) -> RoutedSchedule:
        return self.simulation.schedule

    @property
    def routing(self) -> Routing:
        return self.simulation.schedule.routing

    @property
    def gap(self) -> float:
        """Return the relative gap to the lower bound: 0.02 is 2%."""
        return self.lower_bound.gap_of(self.simulation.period_s)


def plan_routed(
    costs: RoutedCosts,
    *,
    present: Routing | None = None,
    least_gain: float = LEAST_GAIN,
    split: bool = True,
    deadline_s: float | None = None,
) -> RoutedPlan:
    """Return the best routing found for `costs`, with its orders.

    `present` (None: each micro-batch at its own replica) is kept, with new orders, unless it uses a dead cell or
    another routing gains more than `least_gain`. Deterministic: `deadline_s` stands for a number of simulated
    actions; at least one routing is made. `split` False: all backwards are whole. Raises ScheduleError for a
    `present` of another job.
    """
    present = present or unrouted(costs.job.replicas, costs.stages, costs.micro_batches)
    shape = (costs.job.replicas, costs.micro_batches, costs.stages)
    if (present.replicas, present.micro_batches, len(present.hosts)) != shape:
        raise ScheduleError(
            f"the present routing has {present.replicas} replicas, {present.micro_batches} micro-batches and "
            f"{len(present.hosts)} stages, but the costs {shape[0]}, {shape[1]} and {shape[2]}: plan without it"
        )
    usable = not any(Cell(host, stage) in costs.dead for stage, row in enumerate(present.hosts) for host in set(row))
    actions = 3 * costs.stages * costs.job_micro_batches
    budget = min(_MOST_ACTIONS, _PASSES * actions) if deadline_s is None else int(deadline_s * ACTIONS_PER_SECOND / 10)
    hosts = encode_hosts(present) if usable else []
    found = _native.plan_routed(problem_from_routed(costs), split, hosts, least_gain, budget)
    schedule = RoutedSchedule(
        routing=decode_hosts(found["hosts"], costs), orders=decode_orders(found["orders"], costs.micro_batches)
    )
    return RoutedPlan(
        simulation=routed_simulation(schedule, costs, found),
        lower_bound=LowerBound(seconds=found["bound_s"], kind="stage", where=f"stage {found['bound_stage']}"),
        present_s=found["present_s"] if usable else None,
        kept=found["kept"],
    )


def routed_bound(costs: RoutedCosts, *, split: bool = True) -> LowerBound:
    """Return a lower bound for all routings and orders: a stage's work over its live cells, with the way to it and
    back.

    `split` False: for orders of whole backwards.
    """
    seconds, stage = _native.routed_bound(problem_from_routed(costs), split)
    return LowerBound(seconds=seconds, kind="stage", where=f"stage {stage}")
