# SPDX-License-Identifier: Apache-2.0
"""Time from one iteration to the next without a barrier between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import named_schedules

from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs, uniform_costs_for
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.order_registry import make_schedule
from adaptra_megatron.schedule.periods import period_bound, period_s, plan_for_period, repeated
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import simulate


def _costs(schedule: Schedule) -> Costs:
    return uniform_costs_for(schedule, backward_input_s=1.25, backward_weight_s=0.75)


@given(named_schedules())
def test_it_lies_between_what_a_stage_computes_and_what_an_iteration_alone_takes(schedule: Schedule) -> None:
    costs = _costs(schedule)
    alone_s, found_s = simulate(schedule, costs).makespan_s, period_s(schedule, costs)
    assert 3.0 * schedule.micro_batches * schedule.chunks <= found_s + 1e-9
    assert found_s <= alone_s + 1e-9


@given(named_schedules())
def test_iterations_one_after_the_other_are_a_schedule(schedule: Schedule) -> None:
    twice = repeated(schedule, 2)
    check_schedule(twice)
    assert repeated(schedule, 1) == schedule
    for order, both in zip(schedule.orders, twice.orders, strict=True):
        assert both[: len(order)] == order


@pytest.mark.parametrize(
    ("name", "alone_s", "found_s"), [("1f1b", 33.0, 33.0), ("zb-h1", 27.0, 27.0), ("zb-h2", 27.0, 24.0)]
)
def test_orders_whose_period_is_known(name: str, alone_s: float, found_s: float) -> None:
    costs = uniform_costs(4, 8, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    schedule = make_schedule(name, 4, 8)
    assert simulate(schedule, costs).makespan_s == pytest.approx(alone_s)
    assert period_s(schedule, costs) == pytest.approx(found_s)


@given(
    stages=st.integers(2, 4),
    micro_batches=st.integers(1, 8),
    chunks=st.integers(1, 2),
    room=st.integers(0, 5),
    latency_s=st.sampled_from([0.0, 0.1, 1.0]),
    split=st.booleans(),
)
def test_plans_for_it_keep_the_caps_and_are_no_worse_than_plans_for_makespans(
    stages: int, micro_batches: int, chunks: int, room: int, latency_s: float, split: bool
) -> None:
    links = {(a, b): LinkCost(latency_s, 0.0) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages}
    costs = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.25,
        backward_weight_s=0.75,
        max_in_flight=float(chunks * stages + room),
        links=links,
    )
    found = plan_for_period(costs, deadline_s=0.0, split=split)
    check_schedule(found.schedule, max_in_flight=costs.max_in_flight)
    assert split or not found.schedule.splits_backward
    assert found.makespan_s == pytest.approx(period_s(found.schedule, costs))
    assert found.makespan_s <= period_s(plan(costs, deadline_s=0.0, split=split).schedule, costs) + 1e-9
    assert found.gap >= -1e-9
    assert found.lower_bound == period_bound(costs)


def test_memory_for_twice_the_warm_up_takes_the_bubbles_of_filling_and_draining_away() -> None:
    def planned(room: float) -> float:
        costs = uniform_costs(4, 8, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, max_in_flight=room)
        return plan_for_period(costs).makespan_s

    assert planned(4) == pytest.approx(27.0)
    assert planned(7) == pytest.approx(24.0)
