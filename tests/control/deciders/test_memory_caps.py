# SPDX-License-Identifier: Apache-2.0
"""Caps from measured memory, as plans keep them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.decision_engine import DecisionEngine, Replanner
from adaptra_megatron.control.deciders.plan_state import Layout, PlanState
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.schedule.classic import one_f_one_b, split_backward
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.events import RunStarted
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import RankFigures, scalars
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes

FOUR = Layout(stages=4, chunks=1, group_size=None)
INTERLEAVED = Layout(stages=4, chunks=2, group_size=None)


@pytest.mark.parametrize(
    ("rooms", "caps"),
    [
        ({}, (4, 3, 2, 1)),
        ({0: 9, 2: 6}, (9, 3, 6, 1)),
        ({0: 2, 1: 0, 2: 2, 3: 5}, (4, 3, 2, 5)),
        (dict.fromkeys(range(4), 1000), (12, 12, 12, 12)),
    ],
)
def test_a_stage_may_hold_what_it_has_room_for_and_never_less_than_stocks_order(
    rooms: dict[int, int], caps: tuple[int, ...]
) -> None:
    assert PlanState(AdaptraConfig(), FOUR, measures_memory=True).caps(12, rooms) == caps


def test_a_given_cap_counts_whatever_was_measured() -> None:
    book = PlanState(AdaptraConfig(max_in_flight=5), FOUR, measures_memory=True)
    assert book.caps(12, {0: 9, 1: 2}) == (5, 5, 5, 5)


def test_without_a_source_of_memory_every_stage_may_hold_what_stocks_fullest_does() -> None:
    assert PlanState(AdaptraConfig(), FOUR).caps(12) == (4, 4, 4, 4)


@pytest.mark.parametrize("layout", [FOUR, INTERLEAVED])
def test_until_memory_is_measured_no_stage_holds_more_than_in_stocks_order(layout: Layout) -> None:
    book = PlanState(AdaptraConfig(), layout, measures_memory=True)
    schedule, caps = book.schedule_for(8), book.caps(8)
    assert peak_in_flight(schedule, 0.0) == caps
    assert [book.enforced_cap(8, stage) for stage in range(4)] == list(caps)


def test_caps_are_counted_with_the_released_fraction_they_were_made_for() -> None:
    book = PlanState(AdaptraConfig(), FOUR, measures_memory=True)
    late = split_backward(one_f_one_b(4, 12), 2)
    held, counted = peak_in_flight(late, 0.0), peak_in_flight(late, 0.5)
    assert counted[3] < held[3]
    with pytest.raises(ScheduleError, match="stage"):
        book.install(late, 1, counted)
    assert (book.number, book.released_at_backward_input(12, 3)) == (0, 0.0)
    book.install(late, 1, counted, 0.5)
    assert (book.number, book.released_at_backward_input(12, 3), book.enforced_cap(12, 3)) == (1, 0.5, counted[3])


def slow_link(**changes: object) -> Costs:
    costs = uniform_costs(
        4,
        12,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
        links={(1, 2): LinkCost(0.04), (2, 1): LinkCost(0.04)},
        max_in_flight=10.0,
    )
    return dataclasses.replace(costs, **changes)  # type: ignore[arg-type]


def test_a_plan_that_would_hold_too_much_is_replaced_even_by_a_slower_one() -> None:
    replanner = Replanner(FOUR)
    roomy, _ = replanner.decide(slow_link(), split_backward(one_f_one_b(4, 12), 0))
    assert roomy is not None
    assert max(peak_in_flight(roomy, 0.0)) > 5
    less = (10.0, 5.0, 5.0, 5.0)
    chosen, made = replanner.decide(slow_link(max_in_flight=less), roomy)
    assert chosen is not None
    assert made is not None
    check_schedule(chosen, max_in_flight=less)
    assert made.adopted
    assert made.predicted_s > (made.current_predicted_s or 0.0), "slower, but it fits"
    assert "stage 1 may hold 5 activations instead of 10" in made.reason
    assert "activations, but has memory for 5" in made.reason
    again, nothing = replanner.decide(slow_link(max_in_flight=less), chosen)
    assert (again, nothing) == (None, None)


def test_more_memory_makes_planning_worth_while() -> None:
    replanner = Replanner(FOUR)
    tight = (4.0, 3.0, 2.0, 1.0)
    chosen, _ = replanner.decide(slow_link(max_in_flight=tight), split_backward(one_f_one_b(4, 12), 0))
    current = chosen or split_backward(one_f_one_b(4, 12), 0)
    chosen, made = replanner.decide(slow_link(), current)
    assert chosen is not None
    assert made is not None
    assert "stage 0 may hold 10 activations instead of 4" in made.reason
    assert made.predicted_s < 0.9 * (made.current_predicted_s or 0.0)


def test_a_larger_released_fraction_makes_planning_worth_while() -> None:
    replanner = Replanner(FOUR)
    current = split_backward(one_f_one_b(4, 12), 0)
    replanner.decide(slow_link(), current)
    _, made = replanner.decide(slow_link(released_at_backward_input=(0.0, 0.0, 0.5, 0.5)), current)
    assert made is not None
    assert made.reason.startswith("input gradients of stage 2 release 0.5 of an activation instead of 0")


@pytest.fixture
def telemetry() -> Iterator[RunTelemetry]:
    place = RankPlace(run="", rank=0, local_rank=0, stage=0, leads=True)
    telemetry = RunTelemetry(TelemetrySettings(), place, RunStarted(layout={}, versions={}, config={}))
    yield telemetry
    telemetry.close()


def measured(iteration: int, rooms: dict[int, float]) -> list[StageMeasurement]:
    """Every action takes a second, a message 1->2 takes six; `rooms`: what stages report, in activations."""
    found = []
    keys = [MessageKey(iteration, Direction.ACTIVATION, 0, number) for number in range(12)]
    sent = [MessageTimes(key, 2, 1.0 + 4 * key.micro_batch, 1.0 + 4 * key.micro_batch, 8, Path.DEVICE) for key in keys]
    came = [entry._replace(peer=1, posted_s=0.0, done_s=entry.done_s + 6.0) for entry in sent]
    for stage in range(4):
        records = [
            ActionRecord(iteration, stage, kind, 0, number, 0.0, 4.0 * number + place, 4.0 * number + place + 1.0)
            for number in range(12)
            for place, kind in enumerate("FIW")
        ]
        times = (sent if stage == 1 else [], came if stage == 2 else [])
        memory = StageMemory(rooms[stage], 1e8, 1e9, 0.6) if stage in rooms else None
        found.append(stage_measurement(0, stage, 12, records, times, 0.0, memory=memory))
    return found


def test_the_leaders_decision_carries_the_caps_it_was_made_for(telemetry: RunTelemetry) -> None:
    leader = DecisionEngine(PlanState(AdaptraConfig(), FOUR, measures_memory=True), telemetry)
    follower = PlanState(AdaptraConfig(), FOUR, measures_memory=True)
    roomy = dict.fromkeys(range(4), 9.3)
    for iteration, (rooms, caps, released) in enumerate(
        [({}, (4, 3, 2, 1), 0.0), (roomy, (9, 9, 9, 9), 0.5), ({**roomy, 1: 5.9}, (9, 5, 9, 9), 0.5)]
    ):
        decision = leader.decide([measured(iteration, rooms)])
        order, telemetry = decision.order, decision.telemetry
        if order is None:
            assert iteration == 0, "stock's order may be as good as any under its own caps"
            continue
        costs = order.costs
        assert (costs.max_in_flight, costs.released_at_backward_input) == (caps, (released,) * 4)
        schedule = order.schedule()
        follower.install(schedule, decision.number, costs.max_in_flight, costs.released_at_backward_input)
        assert [follower.enforced_cap(12, stage) for stage in range(4)] == list(caps)
        assert telemetry is not None
        assert telemetry.job is not None
        assert [telemetry.job.unpacked().memory[stage].cap for stage in range(4)] == list(caps)
        shown = scalars(RankFigures(iteration_s=1.0, peak_in_flight=4, plan_number=1), telemetry.job.unpacked())
        assert shown["adaptra/stage_1/activation_cap"] == caps[1]
        assert (shown["adaptra/stage_1/activation_bytes"], shown["adaptra/stage_1/free_bytes"]) == (1e8, 1e9)
    assert follower.number == decision.number >= 2


def test_a_given_cap_beyond_the_memory_is_warned_of_once(
    telemetry: RunTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    leader = DecisionEngine(PlanState(AdaptraConfig(max_in_flight=8), FOUR, measures_memory=True), telemetry)
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            leader.decide([measured(iteration, {2: 6.5})])
    (said,) = [message for message in caplog.messages if "--adaptra-max-in-flight" in message]
    assert said.startswith("adaptra: stage 2 may hold 8 activations of 100.0 MB, but has memory for 6; lower")
