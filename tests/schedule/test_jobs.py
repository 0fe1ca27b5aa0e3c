# SPDX-License-Identifier: Apache-2.0
"""Jobs of many replicas: costs of each, iteration time of all, the one plan for them, why the slowest is slow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_simulator import random_costs

from adaptra_megatron.schedule.classic import gpipe, one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import (
    JobCosts,
    LinkChange,
    Override,
    job_costs_from_json,
    job_of,
    ranges,
    worst_costs,
)
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.jobs.job_simulation import (
    find_cause,
    iteration_s,
    job_bound,
    simple_bound_s,
    simulate_job,
)
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import SimulationError, simulate, simulate_online

BASE = uniform_costs(
    4, 12, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, links={(0, 1): LinkCost(0.0, 0.001)},
    max_in_flight=6,
)  # fmt: skip
SLOW_LINK = Override(replicas=(1, 3), links={(1, 2): LinkChange(latency_s=0.06), (2, 1): LinkChange(latency_s=0.06)})
SLOW_STAGE = Override(replicas=(2,), slow_stages={3: 1.25})


@st.composite
def random_jobs(draw: st.DrawFn) -> JobCosts:
    base = draw(random_costs(max_stages=5, max_micro_batches=8, max_chunks=2))
    replicas = draw(st.integers(1, 5))
    overrides = []
    for _ in range(draw(st.integers(0, 3))):
        stage = draw(st.integers(0, base.stages - 1))
        links = {}
        if base.stages > 1:
            links[stage, (stage + 1) % base.stages] = LinkChange(draw(st.floats(0.0, 0.1)), None)
        overrides.append(
            Override(
                replicas=draw(st.none() | st.lists(st.integers(0, replicas - 1), min_size=1).map(tuple)),
                links=links,
                slow_stages={stage: draw(st.floats(0.5, 2.0))},
            )
        )
    sync_s = draw(st.just(()) | st.lists(st.floats(0.0, 0.2), min_size=base.stages, max_size=base.stages))
    return JobCosts(base, replicas=replicas, overrides=overrides, gradient_sync_s=sync_s)


def test_equal_replicas_are_one_group_and_links_keep_what_is_not_changed() -> None:
    job = JobCosts(BASE, replicas=6, overrides=[SLOW_LINK, SLOW_STAGE], ranks_per_stage=8)
    assert [group.replicas for group in job.groups] == [(0, 4, 5), (1, 3), (2,)]
    assert (job.replicas, job.ranks, job.is_one_pipeline) == (6, 6 * 4 * 8, False)
    assert job.groups[0].costs == BASE
    assert job.groups[1].costs.links == {
        (0, 1): LinkCost(occupancy_s=0.001),
        (1, 2): LinkCost(0.06),
        (2, 1): LinkCost(0.06),
    }
    assert job.groups[2].costs.forward_s[3] == (0.02 * 1.25,)
    worst = worst_costs(job.groups)
    assert worst.links == job.groups[1].costs.links
    assert worst.backward_weight_s == job.groups[2].costs.backward_weight_s


def test_different_overrides_to_the_same_costs_are_one_group() -> None:
    same = [Override(replicas=(number,), links={(0, 1): LinkChange(0.5, 0.25)}) for number in (2, 0)]
    job = JobCosts(BASE, replicas=3, overrides=[*same, Override(replicas=(1,), links={(0, 1): LinkChange(0.5)})])
    assert [group.replicas for group in job.groups] == [(0, 2), (1,)]
    everywhere = JobCosts(BASE, replicas=3, overrides=[Override(slow_stages={0: 2.0})])
    assert [group.replicas for group in everywhere.groups] == [(0, 1, 2)]
    assert everywhere.groups[0].costs.forward_s[0] == (0.04,)
    assert ranges((0, 1, 2, 4, 6, 7)) == "0-2, 4, 6-7"


@settings(max_examples=40, deadline=None)
@given(job=random_jobs())
def test_a_job_of_pipelines_has_their_costs(job: JobCosts) -> None:
    pipelines = [group.costs for group in job.groups for _ in group.replicas]
    found = job_of(pipelines, gradient_sync_s=job.gradient_sync_s)
    order = gpipe(job.base.stages, job.base.micro_batches, chunks=job.base.chunks)
    assert simulate_job(order, found).makespan_s == simulate_job(order, job).makespan_s
    for group in found.groups:
        for costs in (pipelines[replica] for replica in group.replicas):
            assert group.costs.tables() == costs.tables()
            assert group.costs.micro_batch_factors == costs.micro_batch_factors
            assert all(group.costs.link(*ends) == costs.link(*ends) for ends in group.costs.links)


def test_what_replicas_share_is_the_same_in_all() -> None:
    whole = BASE.with_tables({"backward_s": BASE.forward_s})
    with pytest.raises(CostError, match="max_in_flight of replica 1 is unlike that of replica 0"):
        job_of([BASE, dataclasses.replace(BASE, max_in_flight=(5,) * 4)])
    for pipelines in ([BASE, whole], [whole, BASE]):
        with pytest.raises(CostError, match="backward_s of replica 1 is unlike that of replica 0"):
            job_of(pipelines)
    with pytest.raises(CostError, match="an override has backward_s, the costs have forward_s"):
        JobCosts(BASE, replicas=2, overrides=[Override(replicas=(1,), tables={"backward_s": BASE.forward_s})])


DOCUMENT: dict[str, Any] = {
    "stages": 4,
    "micro_batches": 12,
    "forward_s": 0.02,
    "backward_input_s": 0.02,
    "backward_weight_s": 0.02,
    "links": [{"from": 0, "to": 1, "occupancy_s": 0.001}],
    "max_in_flight": 6,
}


def test_a_job_is_read_from_json() -> None:
    slow_link = {"replicas": [1, "3-3"], "links": [{"from": s, "to": 3 - s, "latency_s": 0.06} for s in (1, 2)]}
    replicas = {"count": 6, "overrides": [slow_link, {"replicas": [2], "slow_stages": [{"stage": 3, "factor": 1.25}]}]}
    more = {"replicas": replicas, "ranks_per_stage": 8, "gradient_sync_s": 0.1, "message_bytes": 1 << 20}
    job = job_costs_from_json({**DOCUMENT, **more})
    expected = JobCosts(
        BASE,
        replicas=6,
        overrides=[SLOW_LINK, SLOW_STAGE],
        ranks_per_stage=8,
        gradient_sync_s=[0.1] * 4,
        message_bytes=1 << 20,
    )
    assert job == expected
    assert job_costs_from_json({**DOCUMENT, "replicas": 6}) == JobCosts(BASE, replicas=6)
    assert job_costs_from_json(DOCUMENT).is_one_pipeline
    table = {"count": 2, "overrides": [{"replicas": ["0-1"], "forward_s": [0.01, 0.02, 0.03, 0.04]}]}
    assert job_costs_from_json({**DOCUMENT, "replicas": table}).groups[0].costs.forward_s[2] == (0.03,)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"replicas": 0}, "replicas must be a whole number of at least 1, got 0"),
        ({"replicas": {"overrides": []}}, "replicas needs a 'count'"),
        ({"replicas": {"count": 2, "override": []}}, "unknown field 'override' in replicas"),
        ({"ranks_per_stage": 1.5}, "ranks_per_stage must be a whole number"),
        ({"message_bytes": 0}, "message_bytes must be a whole number"),
        ({"gradient_sync_s": [0.1]}, "gradient_sync_s has 1 entries for 4 stages"),
        ({"gradient_sync_s": [0.1, 0.1, -1, 0]}, "gradient_sync_s of stage 2 must be seconds >= 0, got -1"),
        ({"gradient_sync_s": "much"}, "gradient_sync_s must be seconds"),
        ({"replicas": 1 << 30}, "replicas must be at most"),
    ],
)
def test_impossible_jobs_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError, match=message):
        job_costs_from_json({**DOCUMENT, **more})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"replicas": [8]}, r"an override names replica 8, but there are 8 \(0..7\)"),
        ({"replicas": ["6-2"]}, "'6-2' is no replica and no range"),
        ({"replicas": 3}, "replicas of an override must be a list"),
        ({"replicas": [1], "link": []}, "unknown field 'link' in an override of replicas"),
        ({"links": [{"from": 0}]}, "links of an override must be a list of objects with from and to"),
        ({"links": [{"from": 0, "to": 2, "latency_s": 1}]}, "link 0->2 joins stages that are not neighbours"),
        ({"links": [{"from": 0, "to": 1, "latency_s": -1}]}, "latency_s of link 0->1 must be seconds >= 0"),
        ({"slow_stages": [{"stage": 4, "factor": 2}]}, "slow stage 4 is none of the stages 0..3"),
        ({"slow_stages": [{"stage": 0, "factor": 0}]}, "factor of slow stage 0 must be a number above 0"),
        ({"forward_s": [1, 2]}, "forward_s has 2 rows for 4 stages"),
        ([], "an override of replicas must be an object"),
    ],
)
def test_impossible_overrides_are_refused(override: Any, message: str) -> None:
    with pytest.raises(CostError, match=message):
        job_costs_from_json({**DOCUMENT, "replicas": {"count": 8, "overrides": [override]}})


@settings(max_examples=40, deadline=None)
@given(job=random_jobs())
def test_an_iteration_ends_when_the_last_stage_of_any_replica_is_synchronised(job: JobCosts) -> None:
    order = gpipe(job.base.stages, job.base.micro_batches, chunks=job.base.chunks)
    found = simulate_job(order, job)
    ends = [[times[-1] for times in simulate(order, group.costs).end_s] for group in job.groups]
    assert [list(finish) for finish in found.finish_s] == ends
    last = [max(stage) for stage in zip(*ends, strict=True)]
    assert found.makespan_s == max(end + sync for end, sync in zip(last, job.gradient_sync_s, strict=True))
    assert found.makespan_s == iteration_s([found.finish_s[found.slowest]], job.gradient_sync_s)
    assert found.slowest_replica == simulate(order, job.groups[found.slowest].costs)


@settings(max_examples=40, deadline=None)
@given(job=random_jobs())
def test_online_dispatch_of_a_job_is_that_of_each_replica(job: JobCosts) -> None:
    if any(cap is not None and cap < job.base.chunks for cap in job.base.max_in_flight):
        with pytest.raises(CostError, match="max_in_flight"):
            simulate_job(None, job)
        return
    found = simulate_job(None, job)
    alone = [simulate_online(group.costs) for group in job.groups]
    assert found.slowest_replica == alone[found.slowest]
    assert found.pipelines_s == tuple(simulation.makespan_s for simulation in alone)
    assert found.peak_in_flight == tuple(map(max, zip(*(a.peak_in_flight for a in alone), strict=True)))
    assert found.makespan_s >= job_bound(job).seconds * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(costs=random_costs(max_stages=4, max_micro_batches=6, max_chunks=2, whole=True, varied=True), data=st.data())
def test_bounds_of_a_job_hold_for_uneven_micro_batches(costs: Costs, data: st.DataObject) -> None:
    sync_s = data.draw(st.lists(st.floats(0.0, 0.2), min_size=costs.stages, max_size=costs.stages))
    costs = dataclasses.replace(costs, max_in_flight=())
    job = JobCosts(costs, gradient_sync_s=sync_s)
    orders = [
        gpipe(costs.stages, costs.micro_batches, chunks=costs.chunks),
        *(plan(costs, deadline_s=0.0, split=split).schedule for split in (False, True)),
        None,
    ]
    least_s = min(simulate_job(order, job).makespan_s for order in orders)
    assert simple_bound_s(costs, sync_s) <= least_s * (1 + 1e-9)
    assert job_bound(job).seconds <= least_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(job=random_jobs(), split=st.booleans())
def test_one_plan_for_all_replicas_is_sound_and_no_worse_than_that_for_the_slowest_of_everything(
    job: JobCosts, split: bool
) -> None:
    if any(cap is not None and cap < job.base.chunks for cap in job.base.max_in_flight):
        return
    found = plan_job(job, deadline_s=0.01, split=split)
    released = job.base.released_at_backward_input
    check_schedule(found.schedule, max_in_flight=job.base.max_in_flight, released_at_backward_input=released)
    assert found.simulation == simulate_job(found.schedule, job)
    assert found.lower_bound.seconds <= found.simulation.makespan_s * (1 + 1e-9)
    worst = plan(worst_costs(job.groups), deadline_s=0.01 if len(job.groups) == 1 else 0.005, split=split).schedule
    assert found.simulation.makespan_s <= simulate_job(worst, job).makespan_s * (1 + 1e-12)
    assert found == plan_job(job, deadline_s=0.01, split=split)


def test_another_plan_can_beat_the_one_for_the_slowest_of_everything() -> None:
    """Each replica has a slow link or stage of its own; no pipeline has them all."""
    base = uniform_costs(8, 32, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, max_in_flight=12)
    slow = [(5, 0.03, {1: 1.2}), (2, 0.1, {3: 1.2}), (0, 0.03, {}), (0, 0.03, {6: 1.2})]
    overrides = [
        Override(replicas=(number,), links=dict.fromkeys(both_ways(link), LinkChange(latency_s)), slow_stages=stages)
        for number, (link, latency_s, stages) in enumerate(slow)
    ]
    job = JobCosts(base, replicas=len(overrides), overrides=overrides)
    found = plan_job(job)
    worst = simulate_job(plan(worst_costs(job.groups)).schedule, job).makespan_s
    assert found.simulation.makespan_s < 0.995 * worst


def both_ways(link: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (link, link + 1), (link + 1, link)


@pytest.mark.parametrize(
    ("overrides", "slowest", "what"),
    [
        ([SLOW_LINK, SLOW_STAGE], (1, 3), "link 1-2"),
        ([SLOW_STAGE], (2,), "stage 3"),
        ([Override(replicas=(0,), links={(1, 2): LinkChange(1e-4)}), SLOW_STAGE], (2,), "stage 3"),
        ([Override(links={(2, 3): LinkChange(0.1)})], (0, 1, 2, 3), "link 2-3"),
    ],
)
@pytest.mark.parametrize("schedule", [zb_h1(4, 12), None], ids=["zb-h1", "online"])
def test_the_cause_of_the_slowest_replica_is_named(
    overrides: list[Override], slowest: tuple[int, ...], what: str, schedule: Any
) -> None:
    job = JobCosts(BASE, replicas=4, overrides=overrides)
    if schedule is None and (overrides, slowest) == ([SLOW_LINK, SLOW_STAGE], (1, 3)):
        slowest, what = (2,), "stage 3"  # online dispatch hides the link
    found = simulate_job(schedule, job)
    assert job.groups[found.slowest].replicas == slowest
    cause = find_cause(found)
    assert cause is not None
    assert cause.what == what
    assert 0.0 < cause.gain_s < found.makespan_s


def test_a_slow_link_of_all_replicas_is_a_cause_too() -> None:
    costs = uniform_costs(
        4, 12, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, links={(1, 2): LinkCost(0.2)}
    )
    job = JobCosts(costs, replicas=2)
    cause = find_cause(simulate_job(zb_h1(4, 12), job))
    assert cause is not None
    assert cause.what == "link 1-2"
    even = JobCosts(BASE, replicas=2, overrides=[Override(links={(0, 1): LinkChange(0.0, 0.0)})])
    assert find_cause(simulate_job(zb_h1(4, 12), even)) is None


def test_progress_counts_distinct_replicas() -> None:
    reported: list[tuple[str, int, int]] = []
    job = JobCosts(BASE, replicas=6, overrides=[SLOW_LINK, SLOW_STAGE])
    simulate_job(one_f_one_b(4, 12), job, blocking=True, progress=lambda *what: reported.append(what))
    assert reported == [("simulating replicas", done, 3) for done in (1, 2, 3)]


def test_blocking_replicas_take_what_each_takes_alone() -> None:
    job = JobCosts(BASE, replicas=6, overrides=[SLOW_LINK, SLOW_STAGE])
    order = one_f_one_b(4, 12)
    alone = [simulate(order, group.costs, blocking=True) for group in job.groups]
    found = simulate_job(order, job, blocking=True)
    assert found.pipelines_s == tuple(simulation.makespan_s for simulation in alone)
    assert found.slowest_replica == alone[found.slowest]


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SimulationError, match="the schedule has 5 micro_batches, the costs have 12"):
        simulate_job(zb_h1(4, 5), JobCosts(BASE, replicas=2))
