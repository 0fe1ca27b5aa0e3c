# SPDX-License-Identifier: Apache-2.0
"""Simulate an iteration of a job of many replicas: how long it takes, which replica is the slowest, and why."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.bounds import LowerBound, lower_bound
from adaptra_megatron.schedule.costs import Costs, PerChunk
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, ReplicaGroup
from adaptra_megatron.schedule.simulator import Runner, Simulation, runner, simulation_of

Progress = Callable[[str, int, int], None]
"""Callback(activity, parts done, parts in all), from the caller's thread."""

Finish = Sequence[float]
"""Per stage: end of its last action, in seconds."""

_BOUNDED = 8
"""Number of replica groups whose full bounds are computed: those with the largest simple bounds."""
_ROUNDING = 1e-9
_SUSPECTS = 8
"""Number of links and stages of a slow replica that are tried as the cause: the costliest."""


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class JobSimulation:
    """One iteration of a job, whose replicas run one order or dispatch online. A pipeline is a job of one replica."""

    job: JobCosts
    schedule: Schedule | None
    """The order; None: online dispatch, which has none until it runs."""
    makespan_s: float
    """End of the last gradient synchronisation."""
    finish_s: tuple[Finish, ...]
    """Per group of `job.groups`."""
    peak_in_flight: tuple[float, ...]
    """Most activations each stage holds at once, in any replica."""
    slowest: int
    """Index of the group that ends last."""
    runner: Runner = field(compare=False, repr=False)
    """What ran in each replica."""
    run: _native.Run = field(compare=False, repr=False)
    """Times of the slowest replica."""

    @property
    def pipelines_s(self) -> tuple[float, ...]:
        """Makespan of each group's pipeline, without gradient synchronisation."""
        return tuple(max(finish) for finish in self.finish_s)

    @cached_property
    def slowest_replica(self) -> Simulation:
        """When each action of the slowest replica starts and ends."""
        return simulation_of(self.schedule, self.run, self.job.groups[self.slowest].costs)


@dataclass(frozen=True)
class SlowdownCause:
    """Link or stage whose slowness costs a replica the most."""

    what: str
    """Its name, such as "link 3-4" or "stage 7"."""
    gain_s: float
    """Seconds by which its pipeline would be faster if that link or stage were as fast as elsewhere."""


def simulate_job(
    schedule: Schedule | None, job: JobCosts, *, blocking: bool = False, progress: Progress | None = None
) -> JobSimulation:
    """Simulate `schedule` (None: online dispatch) in every replica. Equal replicas are simulated once, several in
    parallel.

    Raises the errors of `simulate` and `simulate_online`.
    """
    run = runner(schedule, job.base, blocking=blocking)
    doing = "dispatching replicas" if schedule is None else "simulating replicas"
    finish_s: list[Finish] = []
    peaks: tuple[float, ...] = (0.0,) * job.base.stages
    slowest, makespan_s, slowest_run = 0, -math.inf, None
    for index, found in enumerate(for_groups(run, job.groups, doing, progress)):
        finish_s.append(found.finish_s)
        peaks = tuple(map(max, peaks, found.peaks))
        end_s = iteration_s(finish_s[-1:], job.gradient_sync_s)
        if end_s > makespan_s:
            slowest, makespan_s, slowest_run = index, end_s, found
    assert slowest_run is not None, "a job has a replica"
    return JobSimulation(
        job=job,
        schedule=schedule,
        makespan_s=makespan_s,
        finish_s=tuple(finish_s),
        peak_in_flight=peaks,
        slowest=slowest,
        runner=run,
        run=slowest_run,
    )


def iteration_s(finish_s: Iterable[Finish], gradient_sync_s: Sequence[float]) -> float:
    """Return the iteration time. A stage's gradient synchronisation starts when the last replica has finished there."""
    last: Iterable[float] = map(max, zip(*finish_s, strict=True))
    return max(end + sync for end, sync in zip(last, gradient_sync_s, strict=True))


def for_groups(
    work: Callable[[Costs], Result], groups: Sequence[ReplicaGroup], doing: str = "", progress: Progress | None = None
) -> Iterator[Result]:
    """Call `work` with the costs of each group, on all cores: native code releases the GIL."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        for done, result in enumerate(threads.map(lambda group: work(group.costs), groups), start=1):
            if progress is not None:
                progress(doing, done, len(groups))
            yield result


def first_behind(run: Runner, job: JobCosts, groups: Sequence[ReplicaGroup], limit_s: float) -> ReplicaGroup | None:
    """Return the first of `groups` whose iteration ends after `limit_s`; None if none does. Stops early."""
    few = os.cpu_count() or 1
    for first in range(0, len(groups), few):
        some = groups[first : first + few]
        for group, found in zip(some, for_groups(run, some), strict=True):
            if iteration_s([found.finish_s], job.gradient_sync_s) > limit_s:
                return group
    return None


def find_cause(simulation: JobSimulation) -> SlowdownCause | None:
    """Return why the slowest replica is slow; None if no single link or stage makes a difference.

    Links and stages that are slower than usual are reset to the usual costs one by one. The usual costs are those of a
    replica without overrides; if the slowest replica has none, free links and typical stages.
    """
    base, costs = simulation.job.base, simulation.job.groups[simulation.slowest].costs
    before_s = max(simulation.finish_s[simulation.slowest])
    suspects = [*_suspects(costs, base)] or [*_suspects(costs, _even(base))]
    suspects = sorted(suspects, key=lambda suspect: -suspect[0])[:_SUSPECTS]
    ends = [(max(simulation.runner(without).finish_s), what) for _, what, without in suspects]
    best_s, what = min(ends, default=(before_s, ""))
    return SlowdownCause(what, before_s - best_s) if best_s < before_s * (1.0 - _ROUNDING) else None


def job_bound(job: JobCosts, *, progress: Progress | None = None) -> LowerBound:
    """Return a lower bound for an iteration of the job, whatever each replica runs.

    It is the largest bound of the replicas with the most work, plus the synchronisation after the last stage's end.
    """
    sync_s = job.gradient_sync_s
    hardest = hardest_first(job)
    found = list(for_groups(lower_bound, hardest[:_BOUNDED], "bounding replicas", progress))
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
    """Return the least time of a micro-batch's way to a stage, plus all work of that stage and its synchronisation, at
    the worst stage.

    Micro-batches may differ: any may be the first at a stage, and each runs the shorter of its whole and split
    backwards.
    """
    # Of equal micro-batches, one stands for all.
    one = costs if costs.micro_batch_factors else dataclasses.replace(costs, micro_batches=1)
    repeats, worst_s = costs.micro_batches // one.micro_batches, 0.0
    ways_s = [0.0] * one.micro_batches
    places = costs.placement.places
    for place, following in zip(places, (*places[1:], None), strict=True):
        stage, chunk = place
        if chunk > 0:
            break
        work_s = repeats * math.fsum(_least_work_s(one, stage, each) for each in range(costs.chunks))
        worst_s = max(worst_s, (min(ways_s) + work_s + gradient_sync_s[stage]) * (1.0 - _ROUNDING))
        link_s = 0.0 if following is None else costs.link(stage, following.stage).transfer_s
        forward_s = one.micro_batch_s("forward_s", stage, chunk)
        ways_s = [way_s + each_s + link_s for way_s, each_s in zip(ways_s, forward_s, strict=True)]
    return worst_s


def _least_work_s(costs: Costs, stage: int, chunk: int) -> float:
    """Return the least seconds of a chunk's forwards and backwards of all micro-batches."""
    names = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")
    each_s = zip(*(costs.micro_batch_s(name, stage, chunk) for name in names), strict=True)
    return math.fsum(forward_s + min(input_s + weight_s, whole_s) for forward_s, input_s, weight_s, whole_s in each_s)


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
