# SPDX-License-Identifier: Apache-2.0
"""Tables of places, and what takes them: checks, CSV, JSON, planner."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_simulator import random_costs, reference_replay
from support.schedules import random_placements, random_schedules

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import interleaved as interleaved_1f1b
from adaptra_megatron.schedule.costs import (
    CostError,
    Costs,
    LinkCost,
    costs_from_json,
    costs_to_json,
    uniform_costs,
    uniform_costs_for,
)
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Place, Placement, Schedule, ScheduleError, interleaved, v_shape
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.jobs.job_simulation import job_bound, simulate_job
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import SimulationError, simulate, simulate_online
from adaptra_megatron.schedule.v_shaped import zb_v

placements = st.tuples(st.integers(1, 6), st.integers(1, 4)).flatmap(lambda counts: random_placements(*counts))


@given(placements)
def test_every_virtual_stage_has_a_place_of_its_own(placement: Placement) -> None:
    stages, chunks = placement.stages, placement.chunks
    assert sorted(placement.places) == [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    for virtual, place in enumerate(placement.places):
        assert placement.virtual_stage(*place) == virtual
        following = placement.next_place(*place)
        assert following == (placement.places[virtual + 1] if virtual + 1 < stages * chunks else None)
        assert following is None or placement.previous_place(*following) == place
        if following is not None and following.stage != place.stage:
            assert {(place.stage, following.stage), (following.stage, place.stage)} <= set(placement.links)
    for stage in range(stages):  # chunks are in the order of the model
        mine = [placement.virtual_stage(stage, chunk) for chunk in range(chunks)]
        assert mine == sorted(mine)
        assert placement.peers(stage) == [target for source, target in placement.links if source == stage]
    assert placement.previous_place(*placement.places[0]) is None


def test_the_placements_by_name() -> None:
    assert interleaved(3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert interleaved(3, 2).links == ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1))
    assert interleaved(3, 1).links == ((0, 1), (1, 2), (1, 0), (2, 1))
    assert v_shape(3).stage_of == (0, 1, 2, 2, 1, 0)
    assert v_shape(3).places[-1] == Place(0, 1)
    assert v_shape(3).next_place(2, 0) == Place(2, 1)
    assert v_shape(3).links == ((0, 1), (1, 2), (1, 0), (2, 1))
    assert v_shape(3, 3).stage_of == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert [interleaved(s, 2).shares_links for s in (1, 2, 3)] == [False, True, False]
    assert [v_shape(s).shares_links for s in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("stage_of", "message"),
    [
        ((0, 1, 1), "stage 1 holds 2 virtual stages and stage 0 holds 1: all stages hold equally many"),
        ((0, 2), r"must name every stage 0, 1, ..., got \[0, 2\]"),
        ((-1, 0), "must name every stage"),
        ((0.0, 1.0), "must name every stage"),
    ],
)
def test_other_tables_are_refused(stage_of: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Placement(stage_of)


def test_megatrons_own_table_is_none_of_its_own() -> None:
    schedule = interleaved_1f1b(4, 8, 2)
    assert dataclasses.replace(schedule, custom_placement=interleaved(4, 2)) == schedule
    costs = uniform_costs(4, 8, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    assert dataclasses.replace(costs, custom_placement=interleaved(4, 2)) == costs
    assert "placement" not in costs_to_json(costs)
    assert costs.placed(v_shape(4)).placed(interleaved(4, 2)) == costs


@settings(max_examples=60, deadline=None)
@given(random_schedules(placed=True))
def test_csv_says_the_placement(schedule: Schedule) -> None:
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule
    assert schedule_from_csv(schedule_to_csv(schedule), chunks=schedule.chunks) == schedule


@pytest.mark.parametrize(
    ("text", "chunks", "message"),
    [
        ("0F0,0B0,1F0\n1B0", None, r"column 3: '1F0' is in rank 0's row.*; virtual stage 1 is in two"),
        ("0F0,3F0\n1F0", None, r"column 2: '3F0' is in rank 0's row.*; virtual stage 2 is in none"),
        ("0F0,1F0,2F0\n3F0", None, r"column 2: '1F0' .*; here, stage 0 holds 3 virtual stages and stage 1 holds 1"),
        ("0F0,3F0\n1F0,2F0", 1, r"column 2: '3F0' .*; here, 2, and 1 chunks per rank are expected"),
    ],
)
def test_rows_that_say_no_placement_are_refused(text: str, chunks: int | None, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_from_csv(text, chunks=chunks)


@settings(max_examples=60, deadline=None)
@given(random_costs(placed=True, added=True, whole=True, rendezvous=True))
def test_json_says_the_placement(costs: Costs) -> None:
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs


def test_json_takes_placements_by_name() -> None:
    document = {"stages": 3, "chunks": 2, "micro_batches": 4, "forward_s": 1, "backward_input_s": 1}
    document["backward_weight_s"] = 1
    assert costs_from_json({**document, "placement": "v-shape"}).placement == v_shape(3)
    assert costs_from_json({**document, "placement": "interleaved"}) == costs_from_json(document)
    for value, message in (
        ("w-shape", 'placement must be "interleaved", "v-shape" or a list of stages'),
        ([0, 1, 2, 2], "placement: stage 2 holds 2"),
        ([0, 1, 1, 0], "placement is one of 2 stages with 2 chunks each, the costs are of 3 stages with 2"),
    ):
        with pytest.raises(CostError, match=message):
            costs_from_json({**document, "placement": value})
    with pytest.raises(CostError, match="not neighbours"):
        costs_from_json({**document, "stages": 4, "links": [{"from": 0, "to": 2}]})


@settings(max_examples=60, deadline=None)
@given(random_schedules(placed=True), st.integers(0, 2**32))
def test_orders_that_deadlock_are_refused_and_no_others(schedule: Schedule, seed: int) -> None:
    """Actions of different chunks of one stage change places; what the slow simulator gets through is allowed."""
    rng = random.Random(seed)
    orders = []
    for order in schedule.orders:
        changed = list(order)
        for _ in range(rng.randint(0, 3)):
            first = rng.randrange(len(changed))
            second = min(first + 1, len(changed) - 1)
            if changed[first].chunk != changed[second].chunk:
                changed[first], changed[second] = changed[second], changed[first]
        orders.append(tuple(changed))
    shuffled = dataclasses.replace(schedule, orders=tuple(orders))
    costs = uniform_costs_for(schedule)
    if reference_replay(shuffled, costs) is None:
        with pytest.raises(ScheduleError, match="deadlock"):
            check_schedule(shuffled)
        with pytest.raises(SimulationError, match="for ever"):
            simulate(shuffled, costs)
    else:
        check_schedule(shuffled)
        assert lower_bound(costs).seconds <= simulate(shuffled, costs).makespan_s


def test_a_message_within_a_stage_takes_no_link() -> None:
    """Both virtual stages in the middle are stage 1's: of three boundaries only two are crossed."""
    links = {(0, 1): LinkCost(0.5), (1, 0): LinkCost(0.5)}
    costs = uniform_costs(2, 1, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, links=links)
    assert simulate_online(costs).makespan_s == 4 + 4 + 6 * 0.5 + 1
    assert simulate_online(costs.placed(v_shape(2))).makespan_s == 4 + 4 + 4 * 0.5 + 1


def test_schedule_and_costs_of_different_placements_do_not_fit() -> None:
    costs = uniform_costs(2, 4, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(SimulationError, match=r"on stages \[0, 1, 1, 0\], the costs on \[0, 1, 0, 1\]"):
        simulate(zb_v(2, 4), costs)
    with pytest.raises(ScheduleError, match="the schedule has 2 stages of 3 chunks, its placement has 2 of 2"):
        check_schedule(dataclasses.replace(zb_v(2, 4), chunks=3))


@settings(max_examples=40, deadline=None)
@given(random_costs(placed=True, whole=True), st.integers(1, 3))
def test_a_jobs_bound_holds_for_any_placement(costs: Costs, replicas: int) -> None:
    job = JobCosts(costs, replicas=replicas, gradient_sync_s=[0.01] * costs.stages)
    simulation = simulate_job(plan(costs, deadline_s=0.0).schedule, job)
    assert job_bound(job).seconds <= simulation.makespan_s
