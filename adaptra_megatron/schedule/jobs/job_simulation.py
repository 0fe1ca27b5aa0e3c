# SPDX-License-Identifier: Apache-2.0
"""Simulate an iteration of a job of many replicas: how long it takes, which replica is the slowest, and why."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.bounds import LowerBound, lower_bound
from adaptra_megatron.schedule.costs import Costs, PerChunk
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, ReplicaGroup
from adaptra_megatron.schedule.native import encode_schedule, problem_from_costs
from adaptra_megatron.schedule.simulator import peak_in_flight, require_room_for_chunks, simulate
from adaptra_megatron.schedule.transfers.blocking import encoded_programs

Progress = Callable[[str, int, int], None]
"""Callback(activity, parts done, parts in all), from the caller's thread."""

Finish = tuple[float, ...]
"""Per stage: end of its last action, in seconds."""

_BOUNDED = 8
"""Number of replica groups whose full bounds are computed: those with the largest simple bounds."""
_ROUNDING = 1e-9
_SUSPECTS = 8
"""Number of links and stages of a slow replica that are tried as the cause: the costliest."""


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class JobSimulation:
    """One iteration of a job."""

    job: JobCosts
    makespan_s: float
    """End of the last gradient synchronisation."""
    finish_s: tuple[Finish, ...]
    """Per group of `job.groups`."""
    peak_in_flight: tuple[float, ...]
    """Most activations each stage holds at once, in any replica."""
    slowest: int
    """Index of the group that ends last."""

    @property
    def pipelines_s(self) -> tuple[float, ...]:
        """Makespan of each group's pipeline, without gradient synchronisation."""
        return tuple(max(finish) for finish in self.finish_s)


@dataclass(frozen=True)
class SlowdownCause:
    """Link or stage whose slowness costs a replica the most."""

    what: str
    """Its name, such as "link 3-4" or "stage 7"."""
    gain_s: float
    """Seconds by which its pipeline would be faster if that link or stage were as fast as elsewhere."""


def simulate_job(
    schedule: Schedule, job: JobCosts, *, blocking: bool = False, progress: Progress | None = None
) -> JobSimulation:
    """Simulate `schedule` in every replica; equal replicas once, several in parallel.

    Raises SimulationError or ScheduleError as `simulate`.
    """
    simulate_one = fixed_order(schedule, job.base, blocking=blocking)
    finish_s = for_groups(simulate_one, job.groups, "simulating replicas", progress)
    return _job_simulation(job, finish_s, peak_in_flight(schedule, job.base.released_at_backward_input))


def simulate_job_online(job: JobCosts, *, progress: Progress | None = None) -> JobSimulation:
    """Simulate online dispatch in every replica. Raises CostError as `simulate_online`."""
    require_room_for_chunks(job.base)
    found = for_groups(
        lambda costs: _native.dispatch_finish(problem_from_costs(costs)), job.groups, "dispatching replicas", progress
    )
    peaks = tuple(map(max, zip(*(peaks for _, peaks in found), strict=True)))
    return _job_simulation(job, [tuple(finish) for finish, _ in found], peaks)


def fixed_order(schedule: Schedule, costs: Costs, *, blocking: bool = False) -> Callable[[Costs], Finish]:
    """Return a function that replays `schedule` for given costs of the same pipeline as `costs`.

    Raises SimulationError if it does not fit or deadlocks (which no cost changes); ScheduleError as `simulate`.
    """
    simulate(schedule, costs)
    if blocking:
        programs = encoded_programs(schedule)
        return lambda other: tuple(_native.blocking_finish(problem_from_costs(other), programs))
    orders = _native.EncodedOrders(encode_schedule(schedule))
    return lambda other: tuple(_native.replay_finish(problem_from_costs(other), orders))


def online_order(costs: Costs) -> Finish:
    """Return a function that simulates online dispatch for given costs."""
    return tuple(_native.dispatch_finish(problem_from_costs(costs))[0])


def iteration_s(finish_s: Iterable[Finish], gradient_sync_s: Sequence[float]) -> float:
    """Return the iteration time. A stage's gradient synchronisation starts when the last replica has finished there."""
    last: Iterable[float] = map(max, zip(*finish_s, strict=True))
    return max(end + sync for end, sync in zip(last, gradient_sync_s, strict=True))


def for_groups(
    work: Callable[[Costs], Result], groups: Sequence[ReplicaGroup], doing: str = "", progress: Progress | None = None
) -> list[Result]:
    """Call `work` with the costs of each group, on all cores: native code releases the GIL."""
    results: list[Result] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        for result in threads.map(lambda group: work(group.costs), groups):
            results.append(result)
            if progress is not None:
                progress(doing, len(results), len(groups))
    return results


def first_behind(
    run: Callable[[Costs], Finish], job: JobCosts, groups: Sequence[ReplicaGroup], limit_s: float
) -> ReplicaGroup | None:
    """Return the first of `groups` whose iteration ends after `limit_s`; None if none does. Stops early."""
    few = os.cpu_count() or 1
    for first in range(0, len(groups), few):
        some = groups[first : first + few]
        for group, finish in zip(some, for_groups(run, some), strict=True):
            if iteration_s([finish], job.gradient_sync_s) > limit_s:
                return group
    return None


def find_cause(simulation: JobSimulation, run: Callable[[Costs], Finish]) -> SlowdownCause | None:
    """Return why the slowest replica is slow; None if no single link or stage makes a difference.

    `run` simulates it under other costs (`fixed_order`, `online_order`). Links and stages that cost it more than usual
    are reset one by one. Usual are the costs of a replica without overrides; for such a replica, free links and typical
    stages.
    """
    base, costs = simulation.job.base, simulation.job.groups[simulation.slowest].costs
    before_s = max(simulation.finish_s[simulation.slowest])
    suspects = [*_suspects(costs, base)] or [*_suspects(costs, _even(base))]
    suspects = sorted(suspects, key=lambda suspect: -suspect[0])[:_SUSPECTS]
    ends = [(max(run(without)), what) for _, what, without in suspects]
    best_s, what = min(ends, default=(before_s, ""))
    return SlowdownCause(what, before_s - best_s) if best_s < before_s * (1.0 - _ROUNDING) else None


def job_bound(job: JobCosts, *, progress: Progress | None = None) -> LowerBound:
    """Return a lower bound for an iteration of the job, whatever each replica runs.

    It is the largest bound of the replicas with the most work, plus the synchronisation after the last stage's end.
    """
    sync_s = job.gradient_sync_s
    hardest = hardest_first(job)
    found = for_groups(lower_bound, hardest[:_BOUNDED], "bounding replicas", progress)
    best, group = max(zip(found, hardest, strict=False), key=lambda pair: pair[0].seconds)
    seconds, simple_s = best.seconds + min(sync_s), simple_bound_s(hardest[0].costs, sync_s)
    if simple_s > seconds:
        return LowerBound(seconds=simple_s, kind="synchronisation", where=str(hardest[0]))
    return LowerBound(
        seconds=seconds, kind=best.kind, where=best.where if len(hardest) == 1 else f"{best.where} of {group}"
    )


def hardest_first(job: JobCosts) -> list[ReplicaGroup]:
    """Return the groups of `job` by descending `simple_bound_s`."""
    return sorted(job.groups, key=lambda group: -simple_bound_s(group.costs, job.gradient_sync_s))


def simple_bound_s(costs: Costs, gradient_sync_s: Sequence[float]) -> float:
    """Return the time of the first micro-batch's way to a stage, plus all its work and its synchronisation, at the
    worst stage.
    """
    way_s = worst_s = 0.0
    places = costs.placement.places
    for place, following in zip(places, (*places[1:], None), strict=True):
        stage, chunk = place
        if chunk > 0:
            break
        split_s = map(sum, zip(costs.backward_input_s[stage], costs.backward_weight_s[stage], strict=True))
        backward_s = sum(map(min, split_s, costs.whole_backward_s[stage]))
        work_s = costs.micro_batches * (sum(costs.forward_s[stage]) + backward_s)
        worst_s = max(worst_s, (way_s + work_s + gradient_sync_s[stage]) * (1.0 - _ROUNDING))
        way_s += costs.forward_s[stage][chunk]
        if following is not None:
            way_s += costs.link(stage, following.stage).transfer_s
    return worst_s


def _job_simulation(job: JobCosts, finish_s: Sequence[Finish], peaks: tuple[float, ...]) -> JobSimulation:
    ends = [iteration_s([finish], job.gradient_sync_s) for finish in finish_s]
    return JobSimulation(
        job=job,
        makespan_s=max(ends),
        finish_s=tuple(finish_s),
        peak_in_flight=peaks,
        slowest=ends.index(max(ends)),
    )


def _suspects(costs: Costs, usual: Costs) -> Iterable[tuple[float, str, Costs]]:
    """Return each link and stage that costs more than usual: (seconds that it may cost, name, costs without the
    excess).
    """
    for stage in range(costs.stages):
        pairs = {name: (table, usual.tables()[name][stage]) for name, table in costs.tables().items()}
        slow_s = sum(sum(table[stage]) - sum(row) for name, (table, row) in pairs.items() if name != "backward_s")
        if slow_s > 0.0:
            tables = {name: (*table[:stage], row, *table[stage + 1 :]) for name, (table, row) in pairs.items()}
            yield costs.micro_batches * slow_s, f"stage {stage}", costs.with_tables(tables)
    for ends in sorted({(min(link), max(link)) for link in costs.links}):
        links, lost_s = dict(costs.links), 0.0
        for link in (ends, ends[::-1]):
            here, there = costs.link(*link), usual.link(*link)
            lost_s += here.transfer_s - there.transfer_s
            links[link] = there
        if lost_s > 0.0:
            yield costs.micro_batches * lost_s, f"link {ends[0]}-{ends[1]}", dataclasses.replace(costs, links=links)


def _even(costs: Costs) -> Costs:
    """Return the same pipeline with free links and the median stage everywhere."""

    def median(table: PerChunk) -> PerChunk:
        return (tuple(map(statistics.median_low, zip(*table, strict=True))),) * costs.stages

    tables = {name: median(table) for name, table in costs.tables().items()}
    return dataclasses.replace(costs, links={}).with_tables(tables)
