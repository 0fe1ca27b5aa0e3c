# SPDX-License-Identifier: Apache-2.0
"""Costs that went into synthetic records come out of the estimate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.runtime.measurements import (
    StageMeasurement,
    estimate_costs,
    one_way_delays,
    quantile,
    stage_measurement,
)
from adaptra_megatron.runtime.program import message_key
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.classic import one_f_one_b, stock_order
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.routing import needed, produced
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.schedule.split import split_backward
from adaptra_megatron.telemetry.records import ActionRecord
from adaptra_megatron.transport.messages import Direction, MessageKey, MessageTimes

STAGES, MICRO_BATCHES = 4, 8
CLOCK_OFFSETS_S = (0.0, 1000.0, -50.0, 3.0)
"""What each stage's own clock shows later than the common one."""


def costs_of(chunks: int = 1, **links: float) -> Costs:
    """Each stage and kind has seconds of its own."""

    def table(base_s: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(base_s + 0.1 * stage + 0.01 * chunk for chunk in range(chunks)) for stage in range(STAGES))

    return Costs(
        stages=STAGES,
        chunks=chunks,
        micro_batches=MICRO_BATCHES,
        forward_s=table(1.0),
        backward_input_s=table(2.0),
        backward_weight_s=table(3.0),
        links={(int(name[1]), int(name[3])): LinkCost(seconds) for name, seconds in links.items()},
    )


def measured(
    costs: Costs, *, pipeline: int = 0, split: bool = True, posted_ahead_s: float = 100.0
) -> list[StageMeasurement]:
    """What ranks would measure of a pipeline with `costs`: each on a clock of its own, put right by its offset."""
    schedule = stock_order(costs.stages, costs.micro_batches, costs.chunks)
    schedule = split_backward(schedule, 1) if split else schedule
    simulation = simulate(schedule, costs)
    measurements = []
    sent_at_s = {}
    for stage, order in enumerate(schedule.orders):
        for action, end_s in zip(order, simulation.end_s[stage], strict=True):
            message = produced(action, costs.stages, costs.chunks)
            if message is not None:
                sent_at_s[message] = end_s
    for stage, order in enumerate(schedule.orders):
        late_s = CLOCK_OFFSETS_S[stage]
        records, sent, received = [], [], []
        for action, start_s, end_s in zip(order, simulation.start_s[stage], simulation.end_s[stage], strict=True):
            moments = (start_s + late_s - 0.5, start_s + late_s, end_s + late_s)
            records.append(ActionRecord(5, stage, action.kind.value, action.chunk, action.micro_batch, *moments))
            leaving, coming = (f(action, costs.stages, costs.chunks) for f in (produced, needed))
            if leaving is not None:
                sent.append(MessageTimes(message_key(leaving, 5), leaving.target, end_s + late_s, end_s + late_s))
            if coming is not None:
                sent_s = sent_at_s[coming] + late_s
                arrived_s = sent_s + costs.link(coming.source, stage).latency_s
                received.append(MessageTimes(message_key(coming, 5), coming.source, sent_s - posted_ahead_s, arrived_s))
        measurements.append(
            stage_measurement(pipeline, stage, costs.chunks, costs.micro_batches, records, (sent, received), -late_s)
        )
    return measurements


def estimate(measurements: list[StageMeasurement], **changes: Any) -> Costs | None:
    arguments: dict[str, Any] = {
        "stages": STAGES,
        "chunks": 1,
        "micro_batches": MICRO_BATCHES,
        "can_split": True,
        "caps": (4.0,) * STAGES,
        "released_at_backward_input": 0.0,
        "previous": None,
    }
    return estimate_costs(measurements, **(arguments | changes))


def assert_close(estimated: Costs | None, expected: Costs) -> None:
    assert estimated is not None
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        for row, expected_row in zip(getattr(estimated, name), getattr(expected, name), strict=True):
            assert row == pytest.approx(expected_row, abs=1e-9)
    for stage in range(STAGES):
        for link in ((stage, (stage + 1) % STAGES), ((stage + 1) % STAGES, stage)):
            assert estimated.link(*link).latency_s == pytest.approx(expected.link(*link).latency_s, abs=1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_compute_and_link_costs_come_out_as_they_went_in(chunks: int) -> None:
    costs = costs_of(chunks, l0_1=0.25, l1_0=0.5, l2_3=4.0, l3_0=0.125 if chunks > 1 else 0.0)
    estimated = estimate(measured(costs), chunks=chunks)
    assert_close(estimated, costs)
    assert estimated is not None
    assert estimated.max_in_flight == (4.0,) * STAGES
    assert estimated.micro_batches == MICRO_BATCHES


def test_a_receive_posted_after_the_send_says_nothing_of_the_link() -> None:
    costs = costs_of(l0_1=0.25)
    assert one_way_delays(measured(costs))
    assert one_way_delays(measured(costs, posted_ahead_s=-0.001)) == {}
    known = dataclasses.replace(costs_of(), links={(0, 1): LinkCost(0.75)})
    estimated = estimate(measured(costs, posted_ahead_s=-0.001), previous=known)
    assert estimated is not None
    assert estimated.links == {(0, 1): LinkCost(0.75)}, "what was known of the link stays"


def test_a_message_whose_sender_was_not_heard_is_left_out() -> None:
    measurements = measured(costs_of(l0_1=0.25))
    without = [dataclasses.replace(entry, sent=()) if entry.stage == 0 else entry for entry in measurements]
    delays = one_way_delays(without)
    assert (0, 1) not in delays
    assert (1, 2) in delays


def test_several_pipelines_give_the_slowest_place_by_place() -> None:
    slow_link = measured(costs_of(l0_1=0.25, l1_2=2.0), pipeline=0)
    slow_compute = measured(
        dataclasses.replace(costs_of(l0_1=1.0), forward_s=((1.0,), (7.0,), (1.2,), (1.3,))), pipeline=100
    )
    expected = dataclasses.replace(costs_of(l0_1=1.0, l1_2=2.0), forward_s=((1.0,), (7.0,), (1.2,), (1.3,)))
    assert_close(estimate(slow_link + slow_compute), expected)
    assert_close(estimate(slow_compute + slow_link), expected)


def test_nothing_is_estimated_until_every_action_was_measured() -> None:
    whole = measured(costs_of(), split=False)
    assert estimate(whole) is None, "weight gradients were not measured on their own"
    assert estimate(measured(costs_of())[:-1]) is None, "a stage is missing"
    assert estimate([]) is None


def test_whole_backwards_keep_the_split_costs_known_before() -> None:
    before = costs_of()
    faster = dataclasses.replace(before, forward_s=((0.5,),) * STAGES)
    assert_close(estimate(measured(faster, split=False), previous=before), faster)


def test_where_backwards_cannot_be_split_the_whole_counts_as_input_gradient() -> None:
    costs = costs_of()
    expected = dataclasses.replace(costs, backward_input_s=costs.backward_s, backward_weight_s=((0.0,),) * STAGES)
    assert_close(estimate(measured(costs, split=False), can_split=False), expected)


def _link_measurements(delays_s: list[float]) -> list[StageMeasurement]:
    keys = [MessageKey(0, Direction.ACTIVATION, 0, number) for number in range(len(delays_s))]
    measurements = measured(costs_of())
    sent = tuple((1, key, 10.0) for key in keys)
    received = tuple((0, key, 9.0, 10.0 + delay_s) for key, delay_s in zip(keys, delays_s, strict=True))
    return [
        dataclasses.replace(measurements[0], sent=sent, received=()),
        dataclasses.replace(measurements[1], sent=(), received=received),
        *measurements[2:],
    ]


@pytest.mark.parametrize(
    ("delays_s", "expected_s"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.3),
        ([0.1] * 7 + [9.0], 0.1),
        ([9.0, 0.1, 9.0], 9.0),
        ([0.1, 9.0], None),
        ([], None),
    ],
)
def test_one_outlier_changes_nothing_and_two_messages_prove_nothing(
    delays_s: list[float], expected_s: float | None
) -> None:
    estimated = estimate(_link_measurements(delays_s))
    assert estimated is not None
    link = estimated.links.get((0, 1))
    assert link == (None if expected_s is None else LinkCost(pytest.approx(expected_s)))


def test_an_error_of_clocks_never_makes_a_link_faster_than_light() -> None:
    estimated = estimate(_link_measurements([-0.01, -0.02, -0.03]))
    assert estimated is not None
    assert estimated.link(0, 1).latency_s == 0.0


def test_medians_shrug_off_one_slow_action() -> None:
    records = [ActionRecord(0, 2, "F", 0, number, 0.0, 1.0, 1.0 + seconds) for number, seconds in enumerate([2, 90, 2])]
    measurement = stage_measurement(0, 2, 2, 4, records, ([], []), 0.0)
    assert measurement.compute_s == {"F": (2.0, None), "B": (None, None), "I": (None, None), "W": (None, None)}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0]))
def test_the_quantile_is_the_least_value_that_bounds_the_fraction(values: list[float], fraction: float) -> None:
    found = quantile(values, fraction)
    assert sum(value <= found for value in values) >= fraction * len(values)
    assert sum(value < found for value in values) < fraction * len(values)


def test_synthetic_records_are_those_of_the_simulator() -> None:
    """The helper itself: a known pipeline of equal actions."""
    costs = uniform_costs(STAGES, MICRO_BATCHES, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    for measurement, order in zip(measured(costs), one_f_one_b(STAGES, MICRO_BATCHES).orders, strict=True):
        forwards = sum(action.kind is Kind.FORWARD for action in order)
        ends = 1 if measurement.stage in (0, STAGES - 1) else 2
        assert len(measurement.sent) == len(measurement.received) == ends * forwards
        assert measurement.compute_s["I"] == pytest.approx((1.0,))
