# SPDX-License-Identifier: Apache-2.0
"""What higher caps would buy."""

from __future__ import annotations

from hypothesis import given, settings
from reference_simulator import random_costs

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.more_memory import WORTH_NAMING, capped, more_memory
from adaptra_megatron.schedule.planner import plan


def planned_s(costs: Costs) -> float:
    return plan(costs, deadline_s=0.0).makespan_s


@settings(max_examples=50, deadline=None)
@given(costs=random_costs(varied=True, max_chunks=1, max_stages=5, max_micro_batches=8))
def test_each_cap_is_higher_and_faster_than_the_one_before(costs: Costs) -> None:
    costs = capped(costs, 1)
    found = more_memory(costs, planned_s)
    before, before_s = 1, planned_s(costs)
    for cap, seconds in found:
        assert before < cap <= costs.micro_batches
        assert seconds == planned_s(capped(costs, cap)) <= (1.0 - WORTH_NAMING) * before_s
        before, before_s = cap, seconds
    unlimited_s = planned_s(capped(costs, costs.micro_batches))
    assert before_s <= 1.001 * unlimited_s / (1.0 - WORTH_NAMING), "what is left out is small steps alone"


def test_a_slow_link_takes_activations_to_hide() -> None:
    slow = LinkCost(0.15)
    costs = uniform_costs(
        4,
        12,
        forward_s=0.02,
        backward_input_s=0.02,
        backward_weight_s=0.02,
        links={(0, 1): slow, (1, 0): slow},
        max_in_flight=2,
    )
    assert lower_bound(costs).kind == "memory"
    found = more_memory(costs, planned_s)
    assert [cap for cap, _ in found][:2] == [3, 4]
    assert found[-1].makespan_s < 0.6 * planned_s(costs)


def test_without_caps_there_is_nothing_to_buy() -> None:
    free = uniform_costs(2, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    assert more_memory(free, planned_s) == ()
