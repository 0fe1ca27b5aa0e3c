# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from random import Random

import pytest
from cp_sat_oracle import optimum
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from reference_simulator import random_costs
from support.schedules import with_pairs_that_run

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import gpipe, interleaved, one_f_one_b
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate, simulate_online


@settings(max_examples=300, deadline=None)
@given(costs=random_costs(varied=True, max_stages=8, max_micro_batches=16, added=True, whole=True, placed=True))
def test_no_dispatched_schedule_beats_the_bound(costs: Costs) -> None:
    assert lower_bound(costs).seconds <= simulate_online(costs).makespan_s


@settings(max_examples=200, deadline=None)
@given(
    costs=st.booleans().flatmap(
        lambda varied: random_costs(varied=varied, max_micro_batches=16, added=True, whole=True, combined=True)
    ),
    choice=st.randoms(use_true_random=False),
)
def test_no_schedule_of_combined_actions_beats_the_bound(costs: Costs, choice: Random) -> None:
    """Dispatched, planned, or combined wherever the orders of another dispatch allow it."""
    bound_s = lower_bound(costs).seconds
    assert bound_s <= simulate_online(costs).makespan_s
    assert bound_s <= plan(costs, deadline_s=0.001).makespan_s
    uncapped = _without_caps(costs)
    schedule = with_pairs_that_run(simulate_online(uncapped).schedule.separated(), choice)
    assert lower_bound(uncapped).seconds <= simulate(schedule, uncapped).makespan_s


@settings(max_examples=100, deadline=None)
@given(costs=random_costs(varied=True, max_chunks=1, max_stages=8, max_micro_batches=16, whole=True, rendezvous=True))
def test_no_classic_schedule_beats_the_bound(costs: Costs) -> None:
    uncapped = _without_caps(costs)
    for schedule in (one_f_one_b(costs.stages, costs.micro_batches), gpipe(costs.stages, costs.micro_batches)):
        assert lower_bound(uncapped).seconds <= simulate(schedule, uncapped).makespan_s


def _without_caps(costs: Costs) -> Costs:
    return dataclasses.replace(costs, max_in_flight=())


# Shrinking would solve hundreds of models; the first counterexample is small enough.
@seed(20240601)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    costs=st.booleans().flatmap(
        lambda combined: random_costs(
            varied=True,
            max_stages=3,
            max_micro_batches=4,
            max_chunks=2,
            whole_milliseconds=True,
            added=True,
            whole=True,
            placed=not combined,
            combined=combined,
        )
    )
)
def test_the_exact_optimum_does_not_beat_the_bound(costs: Costs) -> None:
    """Whatever CP-SAT finds is a schedule, so this holds whether or not it proves its own bound in time."""
    best = optimum(costs, simulate_online(costs), limit_s=0.5)
    assert lower_bound(costs).seconds <= best.found_s + 1e-9


def test_stage_bound_is_head_and_work() -> None:
    costs = uniform_costs(8, 32, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    bound = lower_bound(costs)
    assert bound.seconds == pytest.approx(7 * 0.02 + 32 * 0.06)
    assert bound.kind == "stage"


def test_link_bound_is_occupancy_between_head_and_tail() -> None:
    costs = uniform_costs(
        4,
        16,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
        links={(2, 1): LinkCost(latency_s=0.03, occupancy_s=0.2)},
    )
    bound = lower_bound(costs)
    # Head: all F and B down to stage 2. Tail: latency, B of stages 1 and 0, W of stage 0.
    assert bound.seconds == pytest.approx(0.06 + 16 * 0.2 + 0.03 + 0.03)
    assert (bound.kind, bound.where) == ("link", "link 2->1")


def test_memory_bound_is_a_round_trip_per_cap_of_micro_batches() -> None:
    costs = uniform_costs(
        2,
        20,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
        links={(0, 1): LinkCost(0.5), (1, 0): LinkCost(0.5)},
        max_in_flight=4,
    )
    bound = lower_bound(costs)
    # Each of the five groups of four micro-batches that fit waits for the round trip and the W of the one before.
    assert bound.seconds >= 5 * 1.04
    assert bound.kind == "memory"
    assert lower_bound(_without_caps(costs)).seconds < 2.0
    assert bound.seconds == pytest.approx(simulate_online(costs).makespan_s, rel=0.05)


def test_no_plan_of_three_chunks_beats_the_memory_bound() -> None:
    """The first gradients of earlier chunks come after later ones of the last chunk: both count, in order of time."""
    slow = LinkCost(0.3)
    costs = uniform_costs(
        2,
        6,
        chunks=3,
        forward_s=0.03,
        backward_input_s=0.05,
        backward_weight_s=0.05,
        links={(0, 1): slow, (1, 0): slow},
        max_in_flight=15,
    )
    bound = lower_bound(costs)
    assert bound.kind == "memory"
    # 5.0 s is possible, and 4.6 s the bound.
    assert bound.seconds <= plan(costs).makespan_s <= 5.0 + 1e-9


@settings(max_examples=300, deadline=None)
@given(
    stages=st.integers(1, 4),
    chunks=st.integers(2, 4),
    micro_batches=st.integers(1, 24),
    times_ms=st.tuples(*[st.sampled_from([0, 5, 10, 30])] * 3),
    latencies_ms=st.tuples(*[st.sampled_from([0, 0, 50, 100]) | st.integers(0, 300)] * 2),
    room=st.integers(0, 12),
    released=st.sampled_from([-0.5, 0.0, 0.3, 0.5, 1.0]),
    saving=st.sampled_from([0.0, 0.2, 0.4]),
)
def test_no_plan_under_a_tight_cap_beats_the_bound_over_slow_links(
    stages: int,
    chunks: int,
    micro_batches: int,
    times_ms: tuple[int, int, int],
    latencies_ms: tuple[int, int],
    room: int,
    released: float,
    saving: float,
) -> None:
    """Micro-batches come in waves, since chunks hold some of each until it is back from the slow links."""
    forward_s, backward_input_s, backward_weight_s = (milliseconds / 1000 / chunks for milliseconds in times_ms)
    ends = (stages // 2 - 1, stages // 2)
    slow = (LinkCost(latency_ms / 1000) for latency_ms in latencies_ms)
    costs = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links=dict(zip((ends, ends[::-1]), slow, strict=True)) if stages > 1 else {},
        max_in_flight=chunks + 1.5 + room / 2,
        released_at_backward_input=released,
        combined_saving=saving,
    )
    bound_s = lower_bound(costs).seconds
    assert bound_s <= simulate_online(costs).makespan_s
    assert bound_s <= plan(costs, deadline_s=0.001).makespan_s


def test_waves_of_micro_batches_wait_for_those_that_hold_all_chunks() -> None:
    """A cap of 20 lets 5 micro-batches hold 4 chunks, between their first F and the first of their B: in four waves."""
    slow = LinkCost(0.06)
    costs = uniform_costs(
        4,
        16,
        chunks=4,
        forward_s=0.005,
        backward_input_s=0.005,
        backward_weight_s=0.00375,
        links={(1, 2): slow, (2, 1): slow},
        max_in_flight=20,
    )
    bound = lower_bound(costs)
    wave_s = 3 * (4 * 0.005 + 0.06) + 2 * (4 * 0.005 + 0.06) + 0.00375
    assert bound.kind == "memory"
    assert 4 * wave_s <= bound.seconds * (1 + 1e-6) <= plan(costs).makespan_s <= 1.05 * bound.seconds


def test_only_a_cap_of_forwards_fills_the_wait_for_the_first_gradient_and_none_of_them_is_combined() -> None:
    slow = LinkCost(0.1)
    costs = uniform_costs(
        2,
        20,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
        links={(0, 1): slow, (1, 0): slow},
        max_in_flight=15,
        combined_saving=0.2,
    )
    bound = lower_bound(costs)
    # The first stage waits for 2 F, 1 B and 2 messages less 15 F; of 20 pairs, 5 save 6 ms each.
    assert bound.seconds == pytest.approx(0.23 - 0.15 + 20 * 0.03 - 5 * 0.006)
    assert (bound.kind, bound.where) == ("memory", "stage 0")
    assert bound.seconds <= plan(costs).makespan_s


def test_one_micro_batch_takes_exactly_the_bound() -> None:
    """There is only one schedule worth running, so the bound must be it."""
    costs = uniform_costs(
        5,
        1,
        chunks=2,
        forward_s=0.01,
        backward_input_s=0.02,
        backward_weight_s=0.04,
        links={(1, 2): LinkCost(0.3, 0.2), (4, 0): LinkCost(0.5, 0.1)},
    )
    assert lower_bound(costs).seconds == pytest.approx(simulate_online(costs).makespan_s)


def test_interleaved_stock_order_does_not_beat_the_bound() -> None:
    costs = uniform_costs(4, 8, chunks=2, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
    simulation = simulate(interleaved(4, 8, 2), costs)
    bound = lower_bound(costs).seconds
    assert bound <= simulation.makespan_s <= 1.2 * bound


def test_bound_of_nothing_is_zero() -> None:
    costs = uniform_costs(2, 2, forward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0)
    assert lower_bound(costs).seconds == 0.0
