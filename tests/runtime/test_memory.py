# SPDX-License-Identifier: Apache-2.0
"""How many activations there is memory for: measured on a made-up allocator whose every byte is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.made_up_memory import MadeUpMemory, MadeUpStage

from adaptra_megatron.runtime.activations import ActivationAccount, ActivationCapError
from adaptra_megatron.runtime.memory import (
    SAMPLED_EVERY,
    SAMPLED_ITERATIONS,
    SETTLED_ITERATIONS,
    SETTLED_ITERATIONS_FP16,
    MemoryMeter,
    StageMemory,
    make_meter,
)
from adaptra_megatron.runtime.memory_caps import RISE_AFTER, MeasuredCaps
from adaptra_megatron.schedule.actions import Kind, Order
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.split import split_backward

MB = 1_000_000
STATIC, ACTIVATION, MESSAGE, SCRATCH = 1000 * MB, 100 * MB, 4 * MB, 30 * MB
SPLIT = split_backward(one_f_one_b(4, 12), 0).orders


def train(
    order: Order, stage: MadeUpStage, meter: MemoryMeter, *, plan_number: int = 0, cap: float | None = None
) -> StageMemory | None:
    """One iteration."""
    meter.begin(plan_number)
    run(order, stage, ActivationAccount(0, cap, 0.0, meter))
    return meter.finish(MESSAGE)


def run(order: Order, stage: MadeUpStage, account: ActivationAccount) -> None:
    for action in order:
        stage.receive(action.kind)
        account.before(action.kind, action.micro_batch, action.chunk)
        stage.compute(action.kind)
        account.after(action.kind)
        stage.end(action.kind)
    stage.flush()


def settled(order: Order, stage: MadeUpStage, meter: MemoryMeter) -> StageMemory:
    """The first report."""
    for _ in range(SETTLED_ITERATIONS):
        assert train(order, stage, meter) is None, "the optimizer's state may not be there yet"
    report = train(order, stage, meter)
    assert report is not None
    return report


@pytest.mark.parametrize("order", [one_f_one_b(4, 12).orders[0], one_f_one_b(4, 12).orders[3], SPLIT[0], SPLIT[2]])
@pytest.mark.parametrize("released", [0.0, 0.5])
def test_what_an_activation_takes_and_what_there_is_room_for(order: Order, released: float) -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE, released=released, scratch=SCRATCH)
    report = settled(order, stage, MemoryMeter(memory, 0.9))
    per_activation = ACTIVATION + MESSAGE
    assert per_activation <= report.activation_nbytes <= per_activation + MESSAGE, "its output may still be on its way"
    room = (0.9 * 4000 * MB - STATIC - SCRATCH) / per_activation
    assert 0.9 * room - 1 < report.room <= room
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in order)
    if splits:
        assert report.released_at_backward_input == pytest.approx(released, abs=0.1)
        assert report.released_at_backward_input <= released + 1e-9, "in doubt, less"
    else:
        assert report.released_at_backward_input is None
    assert report.free_nbytes == pytest.approx(0.9 * 4000 * MB - memory.peak_ever, abs=8 * MESSAGE)


@given(
    st.integers(50 * MB, 400 * MB),
    st.integers(0, 300 * MB),
    st.integers(0, 8 * MB),
    st.sampled_from([0.0, 0.25, 0.6]),
    st.sampled_from([0, 1, 3]),
    st.floats(0.5, 1.0),
    st.integers(0, 900 * MB),
)
def test_a_plan_that_fills_the_room_stays_within_the_allowed_memory(
    activation: int, scratch: int, message: int, released: float, stage_number: int, fraction: float, of_others: int
) -> None:
    """Whatever the sizes: measured under stock's order, then run with as many activations as were told."""
    memory = MadeUpMemory(total=8000 * MB, static=STATIC)
    memory.of_others = of_others
    stage = MadeUpStage(memory, activation, message=message, released=released, scratch=scratch)
    meter = MemoryMeter(memory, fraction)
    order = SPLIT[stage_number]
    for _ in range(SETTLED_ITERATIONS + 1):
        account = ActivationAccount(0, None, 0.0, meter)
        meter.begin(0)
        run(order, stage, account)
        report = meter.finish(message)
    assert report is not None
    assert report.released_at_backward_input is not None
    cap = min(24, math.floor(report.room))
    if cap <= account.peak:
        return  # stock's order is the least there is
    event("filled")
    costs = uniform_costs(
        4,
        24,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        max_in_flight=cap,
        released_at_backward_input=math.floor(8 * report.released_at_backward_input) / 8,
    )
    fuller = plan(costs, deadline_s=0.02).schedule.orders[stage_number]
    memory.peak_ever = memory.allocated
    run(fuller, stage, ActivationAccount(0, cap, costs.released_at_backward_input))
    # Three messages are on their way between actions; the fraction that is not allowed is for them, among others.
    assert memory.peak_ever + of_others <= fraction * memory.total + 3 * message


def test_memory_that_others_take_and_that_the_model_takes_later_is_missed_at_once() -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE, scratch=SCRATCH)
    meter = MemoryMeter(memory, 0.9)
    before = settled(SPLIT[0], stage, meter)
    memory.of_others = 500 * MB
    after = train(SPLIT[0], stage, meter)
    assert after is not None
    assert before.room - after.room == pytest.approx(500 * MB / before.activation_nbytes)
    memory.of_others = 0
    memory.allocate(300 * MB)
    after = train(SPLIT[0], stage, meter)
    assert after is not None
    assert before.room - after.room == pytest.approx(300 * MB / before.activation_nbytes)


def test_a_device_that_runs_full_all_the_same_has_room_for_one_less() -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE)
    meter = MemoryMeter(memory, 0.9)
    rooms = [settled(SPLIT[0], stage, meter).room]
    for shortages in (1, 1, 4):
        memory.shortage_count = shortages
        report = train(SPLIT[0], stage, meter)
        assert report is not None
        rooms.append(report.room)
    assert [rooms[0] - room for room in rooms] == pytest.approx([0.0, 1.0, 1.0, 2.0])


def test_actions_are_looked_at_under_new_plans_and_now_and_then() -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE)
    meter = MemoryMeter(memory, 0.9)
    looked = []
    iterations = SETTLED_ITERATIONS + SAMPLED_EVERY + 10
    for iteration in range(iterations):
        asked = memory.asked
        train(SPLIT[0], stage, meter, plan_number=iteration // (iterations - 4))
        looked.append(memory.asked - asked > 2)
    first = SETTLED_ITERATIONS + SAMPLED_ITERATIONS - 1
    expected = {*range(SETTLED_ITERATIONS, first + 1), first + SAMPLED_EVERY}
    expected |= {iterations - 4, iterations - 3}
    assert {iteration for iteration, was in enumerate(looked) if was} == expected


def test_the_refusal_tells_the_bytes_where_they_are_known() -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE)
    meter = MemoryMeter(memory, 0.9)
    settled(SPLIT[0], stage, meter)
    with pytest.raises(ActivationCapError, match=r"stage 0 .*cap of 2 \(3\d\d MB at 10\d\.0 MB each\)") as refused:
        train(SPLIT[0], stage, meter, cap=2.0)
    assert "--adaptra-memory-fraction" in str(refused.value)


def test_dynamic_loss_scaling_is_given_time_to_settle() -> None:
    """Its first steps are skipped, and the optimizer's state comes with the first that is not."""
    for fp16, expected in ((False, SETTLED_ITERATIONS), (True, SETTLED_ITERATIONS_FP16)):
        memory = MadeUpMemory(total=4000 * MB, static=STATIC)
        stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE)
        meter = make_meter(memory, 0.9, fp16=fp16)
        reports = [train(SPLIT[0], stage, meter) for _ in range(expected + 1)]
        assert [report is None for report in reports] == [True] * expected + [False]


def told(room: float, released: float | None = None) -> StageMemory:
    return StageMemory(room, 1e8, 1e9, released)


def test_caps_fall_at_once_and_rise_after_a_while_and_not_for_a_little() -> None:
    caps = MeasuredCaps()
    caps.observe([(0, None), (1, told(8.9))])
    assert caps.rooms == {1: 8}
    caps.observe([(1, told(7.99))])
    assert caps.rooms == {1: 7}
    for room in [8.1] * 20 + [9.5] * (RISE_AFTER - 1) + [7.2] + [9.5, 8.6] * (RISE_AFTER // 2 - 1) + [9.5]:
        caps.observe([(1, told(room))])
        assert caps.rooms == {1: 7}, room
    caps.observe([(1, told(9.5))])
    assert caps.rooms == {1: 8}, "no more than there was all the time"


def test_the_replica_with_the_least_room_counts_and_the_least_released_fraction() -> None:
    caps = MeasuredCaps()
    assert caps.released_at_backward_input(2) == 0.0
    caps.observe([(0, told(8.0, 0.7)), (0, told(5.0, 0.55)), (1, told(9.0)), (1, None)])
    assert caps.rooms == {0: 5, 1: 9}
    assert caps.released_at_backward_input(2) == 0.0, "stage 1 has not told"
    caps.observe([(1, told(9.0, 0.9)), (0, told(8.0, 0.8))])
    assert caps.released_at_backward_input(2) == 0.5, "in eighths, rounded down; once told never more"
    assert caps.short_of((5.0, 9.0)) is None
    assert caps.short_of((None, 9.5)) == "stage 1 may hold 9.5 activations of 100.0 MB, but has memory for 9"
    assert caps.figures((4.0, 9.0))[0].cap == 4.0
