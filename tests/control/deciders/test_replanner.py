# SPDX-License-Identifier: Apache-2.0
"""When measured costs call for another schedule."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from support.four_stages import FOUR, costs

from adaptra_megatron.control.deciders.decider import material_change
from adaptra_megatron.control.deciders.decision_engine import Replanner
from adaptra_megatron.schedule.classic import one_f_one_b, split_backward
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.planner import Plan, plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import simulate


class TestReplanning:
    CURRENT = split_backward(one_f_one_b(4, 12), 0)

    def test_a_slow_link_is_worth_a_switch(self) -> None:
        slow = costs(slow_s=2.0)
        chosen, _made = Replanner(FOUR).decide(slow, self.CURRENT)
        assert chosen is not None
        check_schedule(chosen, max_in_flight=(4.0,) * 4)
        assert simulate(chosen, slow).makespan_s < 0.98 * simulate(self.CURRENT, slow).makespan_s

    def test_decisions_are_deterministic(self) -> None:
        slow = costs(slow_s=2.0)
        assert Replanner(FOUR).decide(slow, self.CURRENT)[0] == Replanner(FOUR).decide(slow, self.CURRENT)[0]

    def test_the_best_plan_is_kept_until_costs_change_materially(self) -> None:
        replanner = Replanner(FOUR)
        chosen, _made = replanner.decide(costs(slow_s=2.0), self.CURRENT)
        assert chosen is not None
        assert replanner.decide(costs(slow_s=2.0), chosen) == (None, None)
        # Less than a tenth of an action: not even looked at, though the order that ran would lose by far.
        assert replanner.decide(costs(slow_s=2.09), self.CURRENT) == (None, None)
        assert replanner.decide(costs(slow_s=2.2), self.CURRENT)[0] is not None

    def test_small_steps_add_up(self) -> None:
        """Changes count from the costs that were planned for, not from the last ones seen."""
        replanner = Replanner(FOUR)
        replanner.decide(costs(slow_s=0.0), self.CURRENT)
        answers = [replanner.decide(costs(slow_s=0.08 * step), self.CURRENT)[0] for step in range(1, 25)]
        assert any(answer is not None for answer in answers)

    @pytest.mark.parametrize(("gain", "switches"), [(0.019, False), (0.021, True)])
    def test_a_gain_below_two_hundredths_is_not_worth_a_switch(
        self, monkeypatch: pytest.MonkeyPatch, gain: float, switches: bool
    ) -> None:
        healthy = costs()
        now_s = simulate(self.CURRENT, healthy).makespan_s
        best = dataclasses.replace(plan(healthy), makespan_s=(1.0 - gain) * now_s)
        monkeypatch.setattr("adaptra_megatron.schedule.planner.plan", lambda costs, **options: best)
        assert (Replanner(FOUR).decide(healthy, self.CURRENT)[0] is not None) == switches

    def test_a_plan_for_another_number_of_micro_batches_is_replaced(self) -> None:
        chosen, _made = Replanner(FOUR).decide(costs(8), self.CURRENT)
        assert chosen is not None
        assert chosen.micro_batches == 8

    def test_without_a_barrier_a_plan_of_the_same_makespan_is_worth_its_shorter_period(self) -> None:
        roomy = costs(cap=8.0)
        current = plan(roomy).schedule
        assert Replanner(FOUR).decide(roomy, current)[0] is None
        chosen, made = Replanner(dataclasses.replace(FOUR, staggered=True)).decide(roomy, current)
        assert chosen is not None
        assert made is not None
        assert simulate(chosen, roomy).makespan_s == simulate(current, roomy).makespan_s == made.current_predicted_s
        assert made.predicted_s == pytest.approx(made.current_predicted_s - 3.0)
        assert made.predicted_s == pytest.approx(made.lower_bound_s)

    def test_a_finding_is_planned_for_whatever_the_costs_say(self) -> None:
        replanner = Replanner(FOUR)
        chosen, first = replanner.decide(costs(slow_s=2.0), self.CURRENT)
        assert chosen is not None
        assert first is not None
        assert (first.reason, first.adopted) == ("first costs", True)
        again, made = replanner.decide(costs(slow_s=2.0), chosen, ["link 1->2: healthy again", "stage 3: slow"])
        assert again is None, "there is nothing better"
        assert made is not None
        assert (made.reason, made.adopted) == ("link 1->2: healthy again; stage 3: slow", False)
        assert made.predicted_s == made.current_predicted_s

    def test_without_a_finding_the_event_names_the_cost_that_moved(self) -> None:
        replanner = Replanner(FOUR)
        replanner.decide(costs(), self.CURRENT)
        _chosen, made = replanner.decide(costs(slow_s=2.0), self.CURRENT)
        assert made is not None
        assert made.reason == "latency of link 1->2: 2000.0 ms instead of 0.0 ms"
        _chosen, made = replanner.decide(costs(8, slow_s=2.0), self.CURRENT)
        assert made is not None
        assert made.reason == "8 micro-batches instead of 12"

    def test_the_log_says_what_is_gained_and_which_link_is_slow(self, caplog: pytest.LogCaptureFixture) -> None:
        slow = dataclasses.replace(costs(), links={(0, 1): LinkCost(0.1), (2, 1): LinkCost(3.0)})
        with caplog.at_level(logging.DEBUG, logger="adaptra_megatron"):
            assert Replanner(FOUR).decide(slow, self.CURRENT)[0] is not None
        assert "slowest link 2->1, 3000.0 ms" in caplog.text
        assert f"instead of {simulate(self.CURRENT, slow).makespan_s * 1e3:.1f} ms" in caplog.text

    def test_what_memory_would_buy_is_told_once_when_there_is_time_for_it(self) -> None:
        tight, replanner = costs(slow_s=4.0, cap=2.0), Replanner(FOUR)
        replanner.decide(tight, self.CURRENT)
        replanner.decide(tight, self.CURRENT)
        wanted = replanner.worth_of_memory()
        assert wanted is not None
        assert (wanted.source, wanted.target, wanted.held) == (1, 2, 2.0)
        assert wanted.predicted_s == plan(tight, deadline_s=1.0).makespan_s
        assert min(map(int, wanted.caps)) == 3
        for cap, seconds in wanted.caps.items():
            assert seconds == plan(costs(slow_s=4.0, cap=float(cap)), deadline_s=0.0).makespan_s
        assert replanner.worth_of_memory() is None

    def test_no_memory_is_offered_with_which_a_hurried_plan_takes_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The plan that runs was searched for at length, those with more memory are not."""
        tight, replanner = costs(slow_s=4.0, cap=2.0), Replanner(FOUR)
        chosen = plan(tight, deadline_s=0.0)
        shares = {2.0: 1.1, 3.0: 1.03, 4.0: 0.99, 5.0: 0.97}

        def hurried(costs: Costs, *, deadline_s: float, **options: object) -> Plan:
            share = shares.get(costs.max_in_flight[0] or 0.0, 0.9) if deadline_s == 0.0 else 1.0
            return dataclasses.replace(chosen, makespan_s=share * chosen.makespan_s)

        monkeypatch.setattr("adaptra_megatron.schedule.planner.plan", hurried)
        replanner.decide(tight, self.CURRENT)
        wanted = replanner.worth_of_memory()
        assert wanted is not None
        assert list(wanted.caps) == ["5", "6"]

    def test_nothing_is_said_of_memory_where_work_binds(self) -> None:
        replanner = Replanner(FOUR)
        replanner.decide(costs(cap=12.0), self.CURRENT)
        assert replanner.worth_of_memory() is None


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (costs(), False),
        (costs(slow_s=0.099), False),
        (costs(slow_s=0.11), True),
        (costs(forward_s=1.09), False),
        (costs(forward_s=0.85), True),
        (costs(8), True),
        (dataclasses.replace(costs(), links={(3, 0): LinkCost(5.0)}), True),
        (dataclasses.replace(costs(), links={(3, 0): LinkCost(0.0, 0.2)}), True),
        (dataclasses.replace(costs(), links={(3, 0): LinkCost(0.09, 0.09)}), False),
        (dataclasses.replace(costs(), links={}), False),
    ],
)
def test_a_change_matters_from_a_tenth_of_the_mean_action(after: Costs, changed: bool) -> None:
    assert (material_change(costs(), after) is not None) == changed
    assert (material_change(after, costs()) is not None) == changed


def test_what_combining_saves_is_a_cost_like_others() -> None:
    before, after, little_more = (
        dataclasses.replace(costs(), combined_saving=(((saving,),),) * 4) for saving in (0.2, 0.25, 0.23)
    )
    change = material_change(before, after)
    assert change == "what F of chunk 0 and B of chunk 0 save on stage 0, combined: 750.0 ms instead of 600.0 ms"
    assert material_change(before, little_more) is None
