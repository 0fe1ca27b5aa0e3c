# SPDX-License-Identifier: Apache-2.0
"""Which schedule runs: from a file, from given costs, stock's while measuring, a new one where it pays."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.four_stages import FOUR, WHOLE_FIRST, costs

from adaptra_megatron.config import AdaptraConfig, ConfigError
from adaptra_megatron.control.deciders.plan_state import Layout, PlanMismatchError, PlanState
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.schedule.classic import (
    forward_only,
    gpipe,
    interleaved_combined,
    one_f_one_b,
    split_backward,
    split_every_other,
    stock_order,
)
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule, ScheduleError
from adaptra_megatron.schedule.planner import PlanError, plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight

INTERLEAVED = Layout(stages=4, chunks=2, group_size=None)
COSTS: dict[str, Any] = {
    "stages": 4,
    "micro_batches": 3,
    "forward_s": 1.0,
    "backward_input_s": 1.0,
    "backward_weight_s": 1.0,
}


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """Writes a schedule or costs to a file."""

    def write(content: Schedule | dict[str, Any] | str) -> Path:
        path = tmp_path / "given"
        if isinstance(content, Schedule):
            content = schedule_to_csv(content)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def held(schedule: Schedule) -> float:
    return max(peak_in_flight(schedule, 0.0))


class TestPlanFromFile:
    def test_it_runs_as_it_is(self, given: Any) -> None:
        schedule = split_backward(gpipe(4, 9), 2)
        book = PlanState(AdaptraConfig(plan_csv=given(schedule)), FOUR)
        assert book.schedule_for(9) == schedule
        assert book.number == 1
        assert not book.adapts

    @pytest.mark.parametrize("layout", [dataclasses.replace(FOUR, stages=2), INTERLEAVED])
    def test_it_is_for_the_pipeline_that_runs(self, given: Any, layout: Layout) -> None:
        path = given(one_f_one_b(4, 8))
        with pytest.raises(ConfigError, match=f"--adaptra-plan-csv {path}"):
            PlanState(AdaptraConfig(plan_csv=path), layout)

    def test_it_is_for_one_number_of_micro_batches(self, given: Any) -> None:
        book = PlanState(AdaptraConfig(plan_csv=given(one_f_one_b(4, 8))), FOUR)
        with pytest.raises(PlanMismatchError, match="a plan for 8 micro-batches, but an iteration has 6"):
            book.schedule_for(6)

    def test_it_is_read_anew(self, given: Any) -> None:
        config = AdaptraConfig(plan_csv=given(one_f_one_b(4, 8)))
        path = given("0F0,0B0\n1F0\n2F0,2B0\n3F0,3B0\n")
        with pytest.raises(ConfigError, match=f"--adaptra-plan-csv {path}: stage 1 B.* is missing"):
            PlanState(config, FOUR)

    def test_the_cap_counts_only_if_the_user_set_one(self, given: Any) -> None:
        path = given(gpipe(4, 9))
        assert PlanState(AdaptraConfig(plan_csv=path), FOUR).enforced_cap(9, 0) is None
        with pytest.raises(ConfigError, match="its cap is 8"):
            AdaptraConfig(plan_csv=path, max_in_flight=8)
        assert PlanState(AdaptraConfig(plan_csv=path, max_in_flight=9), FOUR).enforced_cap(9, 0) == 9

    def test_actions_are_combined_only_where_megatron_combines(self, given: Any) -> None:
        schedule, combining = interleaved_combined(4, 8, 2), dataclasses.replace(INTERLEAVED, combined=True)
        path = given(schedule)
        assert PlanState(AdaptraConfig(plan_csv=path), combining).schedule_for(8) == schedule
        with pytest.raises(ConfigError, match=r"OVERLAP_F_B.*--overlap-moe-expert-parallel-comm"):
            PlanState(AdaptraConfig(plan_csv=path), INTERLEAVED)

    def test_split_backwards_under_full_recompute_are_warned_of(
        self, given: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        schedule = split_backward(one_f_one_b(4, 8))
        with caplog.at_level(logging.WARNING):
            PlanState(AdaptraConfig(plan_csv=given(schedule)), FOUR)
            assert caplog.text == ""
            PlanState(AdaptraConfig(plan_csv=given(schedule)), WHOLE_FIRST)
        assert "splits backwards under full recompute" in caplog.text


class TestPlanFromGivenCosts:
    def test_it_is_planned_for_each_number_of_micro_batches(self, given: Any) -> None:
        book = PlanState(AdaptraConfig(costs_json=given({**COSTS, "max_in_flight": 4})), FOUR)
        assert not book.adapts
        for micro_batches in (12, 8):
            expected = plan(costs(micro_batches)).schedule
            assert book.schedule_for(micro_batches) == expected
            assert book.schedule_for(micro_batches) is book.schedule_for(micro_batches)
            planned_for = book.planned_for(micro_batches)
            assert planned_for is not None
            assert (planned_for.micro_batches, planned_for.links) == (micro_batches, {})
        assert book.number == 2

    @pytest.mark.parametrize(
        ("in_costs", "flag", "enforced"), [(None, None, 4.0), (7, None, 7.0), (7, 3, 3.0), (None, 6, 6.0)]
    )
    def test_the_cap_is_the_flags_then_the_costs_then_stocks(
        self, given: Any, in_costs: float | None, flag: float | None, enforced: float
    ) -> None:
        slow = [{"from": 1, "to": 2, "latency_s": 9.0}, {"from": 2, "to": 1, "latency_s": 9.0}]
        path = given({**COSTS, "links": slow, "max_in_flight": in_costs})
        book = PlanState(AdaptraConfig(costs_json=path, max_in_flight=flag), FOUR)
        assert held(book.schedule_for(12)) == enforced, "a slow link makes room worth using"
        assert [book.enforced_cap(12, stage) for stage in range(4)] == [enforced] * 4

    @pytest.mark.parametrize("combined", [True, False])
    def test_actions_are_combined_only_where_megatron_combines(self, given: Any, combined: bool) -> None:
        path = given({**COSTS, "chunks": 2, "combined_saving": 0.3})
        layout = dataclasses.replace(INTERLEAVED, combined=combined)
        assert PlanState(AdaptraConfig(costs_json=path), layout).schedule_for(8).combines == combined

    def test_where_memory_is_yet_to_be_measured_no_backward_is_split(self, given: Any) -> None:
        path = given(COSTS)
        assert PlanState(AdaptraConfig(costs_json=path), FOUR).schedule_for(12).splits_backward
        assert not PlanState(AdaptraConfig(costs_json=path), WHOLE_FIRST).schedule_for(12).splits_backward

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ({**COSTS, "stages": 2}, "is for 2 stages, but this pipeline has 4"),
            ({**COSTS, "chunks": 2}, "is for 2 chunks per stage, but this pipeline has 1"),
        ],
    )
    def test_costs_for_another_pipeline_are_refused(self, given: Any, content: Any, said: str) -> None:
        config = AdaptraConfig(costs_json=given(content))
        with pytest.raises(ConfigError, match=f"--adaptra-costs {config.costs_json} {said}"):
            PlanState(config, FOUR)


class TestWithoutAPlan:
    @pytest.mark.parametrize("layout", [FOUR, INTERLEAVED, WHOLE_FIRST])
    def test_observe_keeps_stocks_order_whatever_it_holds(self, layout: Layout) -> None:
        book = PlanState(AdaptraConfig(policy="observe"), layout)
        assert book.schedule_for(8) == stock_order(4, 8, layout.chunks)
        assert book.enforced_cap(8, 0) is None
        assert not book.adapts

    def test_measuring_starts_with_stocks_order_and_every_other_backward_split(self) -> None:
        for layout in (FOUR, INTERLEAVED):
            book = PlanState(AdaptraConfig(), layout)
            assert book.adapts
            stock = stock_order(4, 8, layout.chunks)
            assert book.schedule_for(8) == split_every_other(stock)
            assert book.caps(8) == (held(stock),) * 4
            assert book.enforced_cap(8, 3) == held(stock)
            assert book.number == 0
        assert PlanState(AdaptraConfig(), WHOLE_FIRST).schedule_for(8) == one_f_one_b(4, 8)

    @pytest.mark.parametrize("layout", [FOUR, INTERLEAVED, WHOLE_FIRST])
    def test_measuring_stays_within_a_cap_below_stocks(self, layout: Layout) -> None:
        cap = 2.0 * layout.chunks
        book = PlanState(AdaptraConfig(max_in_flight=cap), layout)
        schedule = book.schedule_for(8)
        check_schedule(schedule, max_in_flight=(cap,) * 4)
        assert held(stock_order(4, 8, layout.chunks)) > cap
        assert schedule.splits_backward != layout.whole_first
        assert book.enforced_cap(8, 0) == cap

    def test_a_cap_that_nothing_fits_is_refused(self) -> None:
        with pytest.raises(PlanError, match="no schedule fits the cap"):
            PlanState(AdaptraConfig(max_in_flight=1), INTERLEAVED).schedule_for(8)

    @pytest.mark.parametrize("layout", [FOUR, INTERLEAVED])
    def test_evaluation_runs_forwards_in_stocks_order(self, layout: Layout) -> None:
        book = PlanState(AdaptraConfig(), layout)
        assert book.evaluation_schedule(8) == forward_only(4, 8, layout.chunks)
        assert book.evaluation_schedule(8) is book.evaluation_schedule(8)


class TestInstalling:
    def test_an_installed_plan_runs_for_its_number_of_micro_batches(self) -> None:
        book = PlanState(AdaptraConfig(), FOUR)
        schedule = split_backward(one_f_one_b(4, 8), 1)
        caps = (5.0, 5.0, 5.0, 5.0)
        book.install(schedule, 3, caps)
        assert book.schedule_for(8) is schedule
        assert (book.number, book.enforced_cap(8, 2), book.planned_for(8)) == (3, 5.0, None)
        book.install(schedule, 4, caps, costs=costs(8))
        assert book.planned_for(8) == costs(8)
        assert book.schedule_for(12) == split_every_other(one_f_one_b(4, 12))
        assert book.planned_for(12) is None

    def test_a_plan_beyond_the_cap_changes_nothing(self) -> None:
        book = PlanState(AdaptraConfig(), FOUR)
        before = book.schedule_for(8)
        with pytest.raises(ScheduleError, match="its cap is 4"):
            book.install(gpipe(4, 8), 1, book.caps(8))
        assert book.schedule_for(8) is before
        assert (book.number, book.enforced_cap(8, 0)) == (0, 4.0)


def test_what_is_in_force_travels_to_ranks_that_know_no_plans() -> None:
    book, other = PlanState(AdaptraConfig(), FOUR), PlanState(AdaptraConfig(), FOUR)
    book.schedule_for(9)
    assert book.in_force == Decision(0), "what runs until costs are known is known to all"
    for number, micro_batches in ((1, 9), (2, 8), (3, 9)):
        known = costs(micro_batches)
        book.install(plan(known).schedule, number, known.max_in_flight, known.released_at_backward_input, known)
    running = book.in_force
    assert running.number == 3
    assert running.order is not None
    schedule = running.order.schedule()
    assert schedule == book.schedule_for(9)
    again = running.order.costs
    other.install(schedule, running.number, again.max_in_flight, again.released_at_backward_input, again)
    assert other.in_force == running
    book.forget()
    assert book.in_force == Decision(0)
