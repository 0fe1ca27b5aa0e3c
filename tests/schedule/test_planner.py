# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest
from cp_sat_oracle import optimum
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import combined_case, emulated_case, roomy_case, tight_case
from reference_simulator import random_costs

from adaptra_megatron.schedule.classic import interleaved, interleaved_combined, one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.planner import Plan, PlanError, plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate


def assert_sound(planned: Plan, costs: Costs) -> None:
    released = costs.released_at_backward_input
    check_schedule(planned.schedule, max_in_flight=costs.max_in_flight, released_at_backward_input=released)
    simulation = simulate(planned.schedule, costs)
    assert simulation.makespan_s == planned.makespan_s
    assert simulation.peak_in_flight == planned.peak_in_flight
    assert planned.lower_bound.seconds <= planned.makespan_s
    assert planned.gap >= 0.0


@settings(max_examples=100, deadline=None)
@given(
    costs=st.booleans().flatmap(
        lambda combined: random_costs(
            varied=True,
            max_stages=8,
            max_micro_batches=16,
            max_chunks=4,
            added=True,
            whole=True,
            rendezvous=True,
            placed=True,
            combined=combined,
        )
    ),
    split=st.booleans(),
)
def test_every_plan_runs_within_its_caps_and_takes_what_it_says(costs: Costs, split: bool) -> None:
    planned = plan(costs, split=split, deadline_s=0.0005)
    assert_sound(planned, costs)
    assert split or not planned.schedule.splits_backward


@settings(max_examples=25, deadline=None)
@given(costs=random_costs())
def test_same_costs_same_plan(costs: Costs) -> None:
    assert plan(costs, patience_s=0.05) == plan(costs, patience_s=0.05)


@settings(max_examples=50, deadline=None)
@given(
    costs=random_costs(
        varied=True, max_chunks=1, max_stages=8, max_micro_batches=16, added=True, whole=True, rendezvous=True
    ),
    split=st.booleans(),
)
def test_never_slower_than_stock_where_stock_fits(costs: Costs, split: bool) -> None:
    stock = simulate(one_f_one_b(costs.stages, costs.micro_batches), costs)
    fits = all(cap is None or peak <= cap for peak, cap in zip(stock.peak_in_flight, costs.max_in_flight, strict=True))
    if fits:
        assert plan(costs, split=split, deadline_s=0.0).makespan_s <= stock.makespan_s * (1 + 1e-12)


def test_never_slower_than_stock_interleaved() -> None:
    costs = uniform_costs(
        4, 16, chunks=2, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, max_in_flight=11
    )
    stock = simulate(interleaved(4, 16, 2), costs)
    assert max(stock.peak_in_flight) == 11
    planned = plan(costs)
    assert_sound(planned, costs)
    assert planned.makespan_s < stock.makespan_s


@pytest.mark.parametrize("number", range(0, 500, 25))
def test_roomy_caps_within_two_percent_of_the_bound(number: int) -> None:
    costs = roomy_case(number)
    planned = plan(costs)
    assert_sound(planned, costs)
    assert planned.gap <= 0.02


@pytest.mark.parametrize("number", [11, 41, 163, 233, 279])
def test_tight_caps_within_five_percent_of_the_optimum(number: int) -> None:
    """The cases of the benchmark whose plans are furthest from the bound."""
    costs = tight_case(number)
    planned = plan(costs)
    assert_sound(planned, costs)
    best = optimum(costs, simulate(planned.schedule, costs), limit_s=2.0)
    # Both are proven; CP-SAT's is the better one unless it ran out of time.
    assert planned.makespan_s <= 1.05 * max(best.proven_s, planned.lower_bound.seconds)
    assert best.found_s <= planned.makespan_s + 1e-9


@pytest.mark.parametrize("released", [0.0, 0.5])
@pytest.mark.parametrize("latency_ms", [0, 20, 40, 60])
@pytest.mark.parametrize("times_ms", [(20, 20, 20), (16, 18, 10)])
def test_emulated_cases_near_the_bound(times_ms: tuple[int, int, int], latency_ms: int, released: float) -> None:
    costs = emulated_case(times_ms, latency_ms, released)
    planned = plan(costs, deadline_s=0.2)
    assert_sound(planned, costs)
    assert planned.gap <= 0.03
    assert planned.makespan_s <= simulate(zb_h1(8, 24), costs).makespan_s * (1 + 1e-12)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(8, 2, 32), (8, 4, 32), (4, 4, 16)])
def test_combined_plans_beat_stocks_order_healthy_and_over_a_slow_link(
    stages: int, chunks: int, micro_batches: int
) -> None:
    """Combining saves a fifth: within 3% of the bound where nothing is slow, and half as fast again over 60 ms."""
    stock = interleaved_combined(stages, micro_batches, chunks)
    for latency_s in (0.0, 0.06):
        costs = combined_case(stages, chunks, micro_batches, latency_s, max(peak_in_flight(stock, 0.0)))
        found, stock_s = plan(costs), simulate(stock, costs).makespan_s
        apart = plan(dataclasses.replace(costs, combined_saving=()))
        check_schedule(found.schedule, max_in_flight=costs.max_in_flight)
        if latency_s:
            assert found.makespan_s <= min(stock_s / 1.5, apart.makespan_s)
        else:
            assert found.schedule.combines
            assert found.makespan_s <= min(stock_s, 1.03 * found.lower_bound.seconds)
            assert found.makespan_s < apart.makespan_s


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "latency_ms", "cap"),
    [(2, 2, 4, 60, 9), (2, 2, 4, 120, 6), (3, 2, 4, 60, 9), (2, 1, 6, 60, 3), (4, 1, 6, 60, 5)],
)
def test_small_combined_plans_are_within_a_thousandth_of_the_optimum(
    stages: int, chunks: int, micro_batches: int, latency_ms: int, cap: float
) -> None:
    """CP-SAT proves these optima in seconds; they are up to 3% above the bound. Out of time, it finds none faster."""
    costs = combined_case(stages, chunks, micro_batches, latency_ms / 1000, cap)
    planned = plan(costs)
    assert_sound(planned, costs)
    best = optimum(costs, simulate(planned.schedule, costs), limit_s=3.0)
    assert planned.lower_bound.seconds <= best.found_s + 1e-9
    assert planned.makespan_s <= 1.001 * best.found_s


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "latency_ms", "cap"),
    [(2, 2, 6, 20, 6), (2, 2, 6, 40, 6), (2, 2, 6, 60, 6), (2, 2, 6, 20, 8), (4, 2, 10, 60, 4), (8, 4, 32, 30, 60)],
)
def test_combined_plans_group_micro_batches_as_slow_links_and_caps_ask(
    stages: int, chunks: int, micro_batches: int, latency_ms: int, cap: float
) -> None:
    """More micro-batches in turn than stages where links are slow, fewer under a tight cap: near the bound. In the last
    case weight gradients also run first until a forward and a backward can be combined."""
    costs = combined_case(stages, chunks, micro_batches, latency_ms / 1000, cap)
    planned = plan(costs)
    assert_sound(planned, costs)
    assert planned.gap <= 0.03


@settings(max_examples=25, deadline=None)
@given(costs=random_costs(varied=True, least_chunks=2, max_stages=4, rendezvous=True, combined=True))
def test_a_longer_search_of_combined_plans_is_sound_repeatable_and_finds_nothing_slower(costs: Costs) -> None:
    planned = plan(costs, patience_s=0.05)
    assert_sound(planned, costs)
    assert planned == plan(costs, patience_s=0.05)
    assert planned.makespan_s <= plan(costs, patience_s=0.0).makespan_s


def test_a_stage_keeps_its_backwards_whole_where_splitting_costs_more_than_it_gains() -> None:
    """A slow link; the first stage has most to do, and whole backwards save it time, elsewhere nothing."""
    costs = uniform_costs(
        4,
        16,
        forward_s=0.02,
        backward_input_s=0.02,
        backward_weight_s=0.02,
        links={(2, 3): LinkCost(0.06), (3, 2): LinkCost(0.06)},
        max_in_flight=6,
    )
    split_s = ((0.026,), (0.02,), (0.02,), (0.02,))
    whole_s = ((0.045,), (0.04,), (0.04,), (0.04,))
    costs = dataclasses.replace(costs, backward_input_s=split_s, backward_weight_s=split_s, backward_s=whole_s)
    planned = plan(costs)
    assert_sound(planned, costs)
    kinds = [{action.kind for action in order} for order in planned.schedule.orders]
    assert Kind.BACKWARD in kinds[0]
    assert all(Kind.BACKWARD_INPUT in others for others in kinds[1:])
    for split in (True, False):
        assert planned.makespan_s < 0.97 * plan(dataclasses.replace(costs, backward_s=None), split=split).makespan_s


def test_no_split_where_the_cap_has_no_room_for_what_it_adds() -> None:
    costs = uniform_costs(
        3,
        6,
        forward_s=0.02,
        backward_input_s=0.02,
        backward_weight_s=0.02,
        max_in_flight=3,
        released_at_backward_input=-2.5,
    )
    planned = plan(costs)
    assert not planned.schedule.splits_backward
    roomy = plan(dataclasses.replace(costs, max_in_flight=(4.0,) * 3))
    assert roomy.schedule.splits_backward
    assert roomy.makespan_s < planned.makespan_s


def test_whole_backwards_only_on_request() -> None:
    costs = uniform_costs(4, 12, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, max_in_flight=6)
    whole = plan(costs, split=False)
    assert {action.kind for order in whole.schedule.orders for action in order} == {Kind.FORWARD, Kind.BACKWARD}
    assert plan(costs).makespan_s < whole.makespan_s


def test_holds_no_more_than_it_needs() -> None:
    """Uncapped and without delays, the bound is reached with far fewer activations than micro-batches."""
    costs = uniform_costs(4, 64, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    planned = plan(costs)
    assert planned.gap < 1e-9
    assert max(planned.peak_in_flight) <= 10


def test_a_slow_link_is_hidden_where_memory_allows() -> None:
    links = {(3, 4): LinkCost(0.06), (4, 3): LinkCost(0.06)}
    costs = uniform_costs(
        8, 24, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, links=links, max_in_flight=12
    )
    assert simulate(one_f_one_b(8, 24), costs, blocking=True).makespan_s > 1.9 * plan(costs).makespan_s


def test_no_room_for_every_chunk_is_an_error() -> None:
    costs = uniform_costs(
        3, 4, chunks=4, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, max_in_flight=3
    )
    with pytest.raises(PlanError, match="stage 0 is 3, but 4 chunks need at least 4"):
        plan(costs)


def test_a_negative_deadline_is_an_error() -> None:
    costs = uniform_costs(2, 2, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    with pytest.raises(ValueError, match="deadline_s must be"):
        plan(costs, deadline_s=-1.0)
