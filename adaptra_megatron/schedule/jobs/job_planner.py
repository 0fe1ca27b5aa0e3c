# SPDX-License-Identifier: Apache-2.0
"""Find one schedule for all replicas of a job, which must run the same: the one whose slowest replica is fastest.

A plan for the slowest of every stage and link over all replicas suits a pipeline that does not exist, and under a cap
it may be slow on the real ones. So plans are also made for few replicas at a time: first for the replica with the most
work, then for the slowest costs of that replica and of the one that is slowest under this plan, and so on (a cutting
plane in the space of replicas). Costs near the first ones are tried, too. The plan with the shortest simulated
iteration over all replicas wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, ReplicaGroup, worst_costs
from adaptra_megatron.schedule.jobs.job_simulation import (
    JobSimulation,
    Progress,
    first_behind,
    hardest_first,
    job_bound,
    simulate_job,
)
from adaptra_megatron.schedule.planner import ENOUGH, default_deadline_s, nearby_costs, plan
from adaptra_megatron.schedule.simulator import runner

_OTHERS = 8
"""Most plans after the one for all replicas."""
_FEW = 4
"""Most replicas of a plan that is not for all."""
_LEAST_S = 0.1
"""Default deadline of the plan for all replicas, and of the others together."""
_NO_GAP = 1e-9


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """One schedule for all replicas, its iteration time, and the lower bound."""

    simulation: JobSimulation
    lower_bound: LowerBound

    @property
    def schedule(self) -> Schedule:
        """Return the schedule."""
        assert self.simulation.schedule is not None, "a plan is not decided online"
        return self.simulation.schedule

    @property
    def gap(self) -> float:
        """Return the relative gap to the lower bound: 0.02 is 2%."""
        return self.lower_bound.gap_of(self.simulation.makespan_s)


def plan_job(
    job: JobCosts, *, deadline_s: float | None = None, split: bool = True, progress: Progress | None = None
) -> JobPlan:
    """Return the best schedule found for all replicas of `job`.

    Deterministic like `plan`: half of `deadline_s` is used to plan for all replicas at once, the rest for few at a
    time; simulating replicas takes additional time. `deadline_s` None: until the plan is within `ENOUGH` of its bound,
    but at most twice 0.1 s, or two searches if these take longer (as `plan` if all replicas are equal). Raises
    PlanError if no schedule fits the caps.
    """
    if len(job.groups) == 1:
        return _plan_for_equals(job, deadline_s, split, progress)
    total_s, enough = deadline_s, _NO_GAP
    if total_s is None:
        total_s, enough = 2.0 * max(_LEAST_S, default_deadline_s(job.base, split=split)), ENOUGH
    bound = job_bound(job, progress=progress)
    schedule = plan(worst_costs(job.groups), deadline_s=0.5 * total_s, split=split).schedule
    simulation = simulate_job(schedule, job, progress=progress)
    best = JobPlan(simulation=simulation, lower_bound=bound)
    chosen: tuple[ReplicaGroup, ...] = (hardest_first(job)[0],)
    variants = 0
    for number in range(_OTHERS):
        if progress is not None:
            progress("planning", 1 + number, 1 + _OTHERS)
        if best.gap <= enough:
            break
        costs = worst_costs(chosen)
        if chosen == job.groups:
            costs, variants = nearby_costs(costs, variants), variants + 1
        schedule = plan(costs, deadline_s=0.5 * total_s / _OTHERS, split=split).schedule
        behind = _behind(schedule, best)
        if behind is None:
            simulation = simulate_job(schedule, job, progress=progress)
            best = JobPlan(simulation=simulation, lower_bound=bound)
            behind = job.groups[simulation.slowest]
        if chosen != job.groups:
            chosen = job.groups if behind in chosen or len(chosen) == _FEW else (*chosen, behind)
    return best


def _behind(schedule: Schedule, best: JobPlan) -> ReplicaGroup | None:
    """Return a replica with which `schedule` is no better than `best`, trying the slow ones first; None if there is
    none.
    """
    job, slow_s = best.simulation.job, best.simulation.pipelines_s
    order = sorted(range(len(slow_s)), key=lambda index: -slow_s[index])
    limit_s = best.simulation.makespan_s * (1.0 - _NO_GAP)
    return first_behind(runner(schedule, job.base), job, [job.groups[index] for index in order], limit_s)


def _plan_for_equals(job: JobCosts, deadline_s: float | None, split: bool, progress: Progress | None) -> JobPlan:
    found = plan(job.groups[0].costs, deadline_s=deadline_s, split=split, progress=progress)
    bound = found.lower_bound if job.is_one_pipeline else job_bound(job)
    return JobPlan(simulation=simulate_job(found.schedule, job), lower_bound=bound)
