# SPDX-License-Identifier: Apache-2.0
"""Compare times of an iteration: of a healthy job, in stock's order, in the present order, planned, and the lower
bound."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import (
    JobSimulation,
    Progress,
    find_cause,
    job_bound,
    simulate_job,
)
from adaptra_megatron.tools.cli.planning.cost_inputs import At, PlanInput, WhatIf
from adaptra_megatron.tools.cli.planning.sweep import STOCK, stock_of
from adaptra_megatron.tools.cli.terminal import print_table

HEADINGS = ("", "iteration", "of healthy", "what binds", "activations")
_AT_THE_BOUND = 1e-3
_SLOW = 2.0
"""A link is slow if it takes this many times as long as links usually do, and a tenth of an action more."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One order of actions, or the lower bound."""

    name: str
    makespan_s: float | None
    """None if Megatron would refuse the order."""
    binds: str
    simulation: JobSimulation | None = None

    @property
    def peak(self) -> float | None:
        """Largest number of activations that any stage holds."""
        return None if self.simulation is None else max(self.simulation.peak_in_flight)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows for the healthy job, stock's order, the present order, the plan, and the bound."""

    rows: tuple[ComparisonRow, ...]
    job: JobCosts
    healthy: JobCosts
    healthy_is: str
    """What counts as healthy, as text."""

    def __getitem__(self, name: str) -> ComparisonRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def healthy_s(self) -> float:
        found = self["healthy"].makespan_s
        assert found is not None, "a plan always fits"
        return found

    def document(self) -> list[dict[str, Any]]:
        """Return the comparison for JSON."""
        return [
            {
                "name": row.name,
                "makespan_s": row.makespan_s,
                "of_healthy": None if row.makespan_s is None else row.makespan_s / self.healthy_s,
                "binds": row.binds,
                "peak_in_flight": row.peak,
            }
            for row in self.rows
        ]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The table as text."""
        return [
            (
                row.name,
                "refused" if row.makespan_s is None else f"{row.makespan_s:.4g} s",
                "" if row.makespan_s is None else f"{row.makespan_s / self.healthy_s:.1%}",
                row.binds,
                "" if row.peak is None else f"{row.peak:g}",
            )
            for row in self.rows
        ]

    @property
    def note(self) -> str:
        """What "healthy" and "now" mean in the table."""
        kept = any(row.name == "now" for row in self.rows)
        return f"healthy: {self.healthy_is}" + ("; now: the order planned for that, kept" if kept else "")

    def print_text(self) -> None:
        """Print the table and the note."""
        print_table(HEADINGS, self.cells)
        print(f"  {self.note}")


def compare(
    given: PlanInput,
    asked: WhatIf,
    *,
    at: At = {},  # noqa: B006
    planned: JobSimulation | None = None,
    timed: ComparisonRow | None = None,
    deadline_s: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Return the comparison for the costs of `given`, changed as `asked`, with ranges at `at`.

    `planned`: the plan, if known. `timed`: a row that replaces "now".
    """
    job = asked.applied_to(given.job, at)
    healthy, healthy_is = healthy_form(given, asked, at)

    def plan_for(one: JobCosts) -> JobSimulation:
        return plan_job(one, deadline_s=deadline_s, progress=progress).simulation

    best = planned or plan_for(job)
    fine = best if healthy == job else plan_for(healthy)
    bound = job_bound(job)
    rows = [row_of("healthy", fine, job_bound(healthy))]
    if (stock := stock_of(job.base)) is not None:
        rows.append(row_of(STOCK, simulate_job(stock[0], job, blocking=stock[1]), bound))
    else:
        rows.append(ComparisonRow(name=STOCK, makespan_s=None, binds="these counts"))
    rows.append(timed or _now(given, fine, job, bound))
    rows.append(row_of("planned", best, bound))
    rows.append(ComparisonRow(name="bound", makespan_s=bound.seconds, binds=in_words(bound)))
    return Comparison(rows=tuple(rows), job=job, healthy=healthy, healthy_is=healthy_is)


def healthy_form(given: PlanInput, asked: WhatIf, at: At = {}) -> tuple[JobCosts, str]:  # noqa: B006
    """Return the job without what slows it down, and its description. That is: without the options; or as in a run's
    first plan; or, if neither is given, with slow links as fast as the others."""
    if asked.slows or asked.max_in_flight is not None:
        return asked.counted(given.job, at), "without what the options change"
    if given.healthy is not None:
        return asked.counted(given.healthy, at), "the run's first plan"
    job = asked.counted(given.job, at)
    links = _evened(job.base)
    if links == job.base.links and len(job.groups) == 1:
        return job, "as given, for no link stands out"
    even = replace(job, base=replace(job.base, links=links), overrides=())
    return even, "slow links as fast as the others" + (", all replicas alike" if len(job.groups) > 1 else "")


def in_words(bound: LowerBound) -> str:
    """Describe the cause of the bound."""
    if bound.kind == "stage":
        return f"{bound.where}, way and work"
    return {"memory": "memory of ", "link": "bandwidth of "}.get(bound.kind, f"{bound.kind} of ") + bound.where


def _evened(costs: Costs) -> dict[tuple[int, int], LinkCost]:
    ends = sorted({*costs.placement.links, *costs.links})
    found = [costs.link(*each) for each in ends]
    usual = sorted(found, key=lambda cost: cost.transfer_s)[(len(found) - 1) // 2] if found else LinkCost()
    action_s = statistics.fmean(seconds for row in costs.forward_s for seconds in row)
    slow_s = max(_SLOW * usual.transfer_s, usual.transfer_s + 0.1 * action_s)
    return {
        each: cost._replace(latency_s=usual.latency_s, occupancy_s=usual.occupancy_s)
        if cost.transfer_s > slow_s
        else cost
        for each, cost in costs.links.items()
    }


def _now(given: PlanInput, healthy: JobSimulation, job: JobCosts, bound: LowerBound) -> ComparisonRow:
    """Return the row of the recorded order if known, else of the one planned for the healthy job."""
    unchanged = job == given.job
    if unchanged and given.order is None and given.now_s is not None:
        return ComparisonRow(name="now", makespan_s=given.now_s, binds="the order that ran")
    try:
        return row_of("now", simulate_job(given.order or healthy.schedule, job), bound)
    except ScheduleError as error:
        return ComparisonRow(name="now", makespan_s=None, binds=str(error))


def row_of(name: str, simulation: JobSimulation, bound: LowerBound) -> ComparisonRow:
    """Return the row of what was simulated."""
    if simulation.schedule is None:
        binds = "decided as messages come"
    elif bound.gap_of(simulation.makespan_s) <= _AT_THE_BOUND:
        binds = in_words(bound)
    else:
        cause = find_cause(simulation)
        binds = "the order of work" if cause is None else f"{cause.what}: {cause.gain_s:.3g} s"
    return ComparisonRow(name=name, makespan_s=simulation.makespan_s, binds=binds, simulation=simulation)
