# SPDX-License-Identifier: Apache-2.0
"""A better plan that costs a switch is held back until it would have paid for it."""

from __future__ import annotations

import dataclasses

import pytest
from support.four_stages import FOUR, costs

from adaptra_megatron.control.deciders.decision_engine import Replanner
from adaptra_megatron.control.deciders.switch_costs import Chosen, DeferredSwitch, moves_forwards
from adaptra_megatron.schedule.classic import one_f_one_b, split_backward, split_every_other

CURRENT = split_backward(one_f_one_b(4, 12), 0)
SLOW = costs(slow_s=2.0)
NOTHING: Chosen = (None, None)


@pytest.fixture
def better() -> Chosen:
    chosen, made = Replanner(FOUR).decide(SLOW, CURRENT)
    assert chosen is not None
    assert made is not None
    return chosen, dataclasses.replace(made, predicted_s=8.0, current_predicted_s=10.0)


def test_a_free_switch_is_made_at_once(better: Chosen) -> None:
    assert DeferredSwitch().decide(better, CURRENT, 0.0) == better


@pytest.mark.parametrize(("switch_s", "iterations"), [(1.0, 1), (5.0, 3), (60.0, 30)])
def test_a_switch_is_made_once_the_plan_would_have_saved_it(better: Chosen, switch_s: float, iterations: int) -> None:
    switch = DeferredSwitch()
    schedule, made = switch.decide(better, CURRENT, switch_s)
    assert schedule is None
    assert made is not None
    assert not made.adopted
    assert made.predicted_s == 10.0
    for _iteration in range(iterations - 1):
        assert switch.decide(NOTHING, CURRENT, switch_s) == NOTHING
    schedule, made = switch.decide(NOTHING, CURRENT, switch_s)
    assert schedule is better[0]
    assert made is not None
    assert made.adopted
    assert f"a switch takes {switch_s:.1f} s" in made.reason
    assert switch.decide(NOTHING, CURRENT, switch_s) == NOTHING, "once"


def test_a_better_plan_that_changes_all_the_time_is_switched_to_as_well(better: Chosen) -> None:
    """As where the times of a link vary: each iteration plans anew."""
    switch, (schedule, made) = DeferredSwitch(), better
    assert made is not None
    for number in range(3):
        assert switch.decide((schedule, dataclasses.replace(made, reason=f"{number}")), CURRENT, 5.0)[0] is None
    found, event = switch.decide((schedule, dataclasses.replace(made, reason="the latest")), CURRENT, 5.0)
    assert found is schedule
    assert event is not None
    assert event.adopted
    assert "the latest; it would have saved 6.0 s" in event.reason
    assert switch.decide(NOTHING, CURRENT, 5.0) == NOTHING, "once"


def test_what_ends_before_changes_nothing_and_counts_for_nothing_later(better: Chosen) -> None:
    switch, kept = DeferredSwitch(), dataclasses.replace(better[1], adopted=False)  # type: ignore[type-var]
    for _time in range(3):
        assert switch.decide(better, CURRENT, 5.0)[0] is None
        assert switch.decide(NOTHING, CURRENT, 5.0) == NOTHING
        assert switch.decide((None, kept), CURRENT, 5.0) == (None, kept)
    assert switch.decide(NOTHING, CURRENT, 5.0) == NOTHING


def test_an_order_that_cannot_go_on_is_left_at_once(better: Chosen) -> None:
    assert DeferredSwitch().decide(better, CURRENT, 60.0, urgent=True) == better


def test_weight_gradients_move_for_nothing(better: Chosen) -> None:
    stock = one_f_one_b(4, 12)
    assert not moves_forwards(stock, split_every_other(stock))
    assert moves_forwards(CURRENT, better[0])  # type: ignore[arg-type]
    moved = split_every_other(stock), better[1]
    assert DeferredSwitch().decide(moved, stock, 60.0) == moved
