# SPDX-License-Identifier: Apache-2.0
"""How many activations there is memory for: measured on a made-up allocator whose every byte is known."""

from __future__ import annotations

import logging
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.made_up.memory import MadeUpMemory, MadeUpStage

from adaptra_megatron.control.deciders.decision_engine import RISE_AFTER, MeasuredCaps
from adaptra_megatron.control.stage_memory import (
    SAMPLED_EVERY,
    SAMPLED_ITERATIONS,
    SETTLED_ITERATIONS,
    SETTLED_ITERATIONS_FP16,
    MemoryMeter,
    StageMemory,
    make_meter,
)
from adaptra_megatron.engine.device_memory import CudaMemory, memory_of
from adaptra_megatron.engine.execution.executor import ActivationAccount, ActivationCapError
from adaptra_megatron.schedule.classic import interleaved_split, one_f_one_b, split_backward
from adaptra_megatron.schedule.ir import Kind, Order

MB = 1_000_000
STATIC, ACTIVATION, MESSAGE, SCRATCH = 1000 * MB, 100 * MB, 4 * MB, 30 * MB
SPLIT = split_backward(one_f_one_b(4, 12), 0).orders


def train(
    order: Order,
    stage: MadeUpStage,
    meter: MemoryMeter,
    message: int = MESSAGE,
    *,
    plan_number: int = 0,
    cap: float | None = None,
) -> StageMemory | None:
    """One iteration."""
    meter.begin(plan_number)
    run(order, stage, ActivationAccount(0, cap, 0.0, meter))
    return meter.finish(message)


def run(order: Order, stage: MadeUpStage, account: ActivationAccount) -> None:
    for action in order:
        stage.receive(action.kind)
        account.before(action)
        stage.compute(action.kind)
        account.after(action)
        stage.end(action.kind)
    stage.flush()


def settled(order: Order, stage: MadeUpStage, meter: MemoryMeter, message: int = MESSAGE) -> StageMemory:
    """The first report."""
    for _ in range(SETTLED_ITERATIONS):
        assert train(order, stage, meter, message) is None, "the optimizer's state may not be there yet"
    report = train(order, stage, meter, message)
    assert report is not None
    return report


@pytest.mark.parametrize("order", [one_f_one_b(4, 12).orders[0], one_f_one_b(4, 12).orders[3], SPLIT[0], SPLIT[2]])
@pytest.mark.parametrize("released", [0.0, 0.5, -0.76])
def test_what_an_activation_takes_and_what_there_is_room_for(order: Order, released: float) -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE, released=released, scratch=SCRATCH)
    report = settled(order, stage, MemoryMeter(memory, 0.9))
    per_activation = ACTIVATION + MESSAGE
    assert report.activation_nbytes == per_activation + MESSAGE, "its output may still be on its way"
    room = (0.9 * 4000 * MB - STATIC - SCRATCH) / per_activation
    assert 0.9 * room - 1 < report.room <= room, "what a waiting weight gradient holds is not taken for scratch"
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in order)
    if splits:
        assert report.released_at_backward_input == pytest.approx(released, abs=0.1)
        waiting = (1.0 - report.released_at_backward_input) * report.activation_nbytes
        assert waiting >= (1.0 - released) * ACTIVATION - 1, "in doubt, more"
    else:
        assert report.released_at_backward_input is None
    assert report.free_nbytes == pytest.approx(0.9 * 4000 * MB - memory.peak_ever, abs=8 * MESSAGE)


@pytest.mark.parametrize("spans", [0, 3])
def test_what_a_recomputed_layer_would_hold_is_guessed_from_whole_backwards(spans: int) -> None:
    memory = MadeUpMemory(total=4000 * MB, static=STATIC)
    scratch = {**dict.fromkeys(Kind, 0), Kind.BACKWARD: SCRATCH}
    stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE, released=-0.5, scratch=scratch)
    meter = MemoryMeter(memory, 0.9, spans=spans)
    report = settled(one_f_one_b(4, 12).orders[1], stage, meter)
    assert report.guessed == (spans > 0)
    if not spans:
        assert report.released_at_backward_input is None
        return
    assert report.released_at_backward_input is not None
    assert -report.released_at_backward_input * report.activation_nbytes >= spans * SCRATCH
    caps = MeasuredCaps()
    caps.observe([(0, report)])
    guessed = caps.released_at_backward_input(1)[0]
    measured = train(SPLIT[1], stage, meter, plan_number=1)
    assert measured is not None
    assert not measured.guessed
    assert measured.released_at_backward_input == pytest.approx(-0.5, abs=0.1)
    caps.observe([(0, measured), (0, report)])
    assert guessed < caps.released_at_backward_input(1)[0] <= -0.5, "what was measured counts, not the guess"
    caps.observe([(0, report)])
    assert guessed < caps.released_at_backward_input(1)[0]


def count(order: Order, released: float) -> float:
    """Most activations at once, as plans count them."""
    changes = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.BACKWARD_INPUT: -released,
        Kind.BACKWARD_WEIGHT: released - 1,
    }
    return max(accumulate(changes[action.kind] for action in order))


ORDERS = [
    split_backward(one_f_one_b(warm_up, 24), delay).orders[0]
    for warm_up in range(2, 25, 2)
    for delay in (0, 1, 3, None)
]


@given(
    st.integers(50 * MB, 400 * MB),
    st.fixed_dictionaries({kind: st.integers(0, 300 * MB) for kind in Kind}),
    st.integers(0, 8 * MB),
    st.sampled_from([-1.6, -0.5, 0.0, 0.25, 0.6]),
    st.sampled_from([0, 1, 3]),
    st.floats(0.5, 1.0),
    st.integers(0, 900 * MB),
)
def test_an_order_that_fills_the_room_stays_within_the_allowed_memory(
    activation: int,
    scratch: dict[Kind, int],
    message: int,
    released: float,
    stage_number: int,
    fraction: float,
    of_others: int,
) -> None:
    """Whatever the sizes: measured under stock's order, then run with as many activations as it said."""
    memory = MadeUpMemory(total=8000 * MB, static=STATIC)
    memory.of_others = of_others
    stage = MadeUpStage(memory, activation, message=message, released=released, scratch=scratch)
    report = settled(SPLIT[stage_number], stage, MemoryMeter(memory, fraction), message)
    assert report.released_at_backward_input is not None
    reported = math.floor(8 * report.released_at_backward_input) / 8
    fitting = [order for order in ORDERS if count(order, reported) <= math.floor(report.room)]
    if not fitting:
        return  # stock's order is the least there is
    fullest = max(fitting, key=lambda order: count(order, reported))
    event(f"filled, {'more' if count(fullest, reported) > count(SPLIT[stage_number], reported) else 'less'} than stock")
    memory.peak_ever = memory.allocated
    run(fullest, stage, ActivationAccount(0, None, 0.0))
    # Three messages are on their way between actions; the fraction that is not allowed is for them, among others.
    assert memory.peak_ever + of_others <= fraction * memory.total + 3 * message


def test_what_an_action_needs_counts_although_the_peak_was_elsewhere() -> None:
    """Weight gradients run while less is held than after forwards; a fuller order may run them while most is."""
    rooms = []
    for scratch in (0, 100 * MB, 200 * MB):
        memory = MadeUpMemory(total=4000 * MB, static=STATIC)
        needs = {**dict.fromkeys(Kind, 0), Kind.BACKWARD_WEIGHT: scratch}
        stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE, released=0.5, scratch=needs)
        report = settled(SPLIT[0], stage, MemoryMeter(memory, 0.9))
        rooms.append(report.room * report.activation_nbytes)
    assert rooms[1] - rooms[2] == pytest.approx(100 * MB)
    assert rooms[0] - rooms[2] == pytest.approx(200 * MB, abs=4 * MESSAGE)


def test_freed_memory_that_another_stream_uses_is_not_there_yet() -> None:
    """It makes no activation larger, but leaves less room."""
    reports = []
    for lingering in (0, 60 * MB):
        memory = MadeUpMemory(total=4000 * MB, static=STATIC)
        stage = MadeUpStage(memory, ACTIVATION, message=MESSAGE)
        meter = MemoryMeter(memory, 0.9)
        settled(SPLIT[0], stage, meter)
        meter.begin(1)
        memory.allocate(lingering)
        memory.lingering, memory.allocated = lingering, memory.allocated - lingering
        run(SPLIT[0], stage, ActivationAccount(0, None, 0.0, meter))
        report = meter.finish(MESSAGE)
        assert report is not None
        reports.append(report)
    assert reports[0].activation_nbytes == reports[1].activation_nbytes
    less = (reports[0].room - reports[1].room) * reports[0].activation_nbytes
    assert less == pytest.approx(60 * MB, abs=4 * MESSAGE)


def test_of_several_chunks_the_largest_activation_counts_and_what_waits_longest_in_bytes() -> None:
    """A small chunk whose weight gradients hold more than its activation does not make those of a large one larger."""
    memory = MadeUpMemory(total=8000 * MB, static=STATIC)
    large = MadeUpStage(memory, 100 * MB, message=0, released=0.5)
    small = MadeUpStage(memory, 20 * MB, message=0, released=-1.0)
    meter = MemoryMeter(memory, 0.9, settled_iterations=0)
    order = interleaved_split(2, 8, 2).orders[0]
    meter.begin(0)
    account = ActivationAccount(0, None, 0.0, meter)
    for action in order:
        stage = (large, small)[action.chunk]
        account.before(action)
        stage.compute(action.kind)
        account.after(action)
    report = meter.finish(0)
    assert report is not None
    assert report.activation_nbytes == 100 * MB
    assert report.released_at_backward_input == pytest.approx(0.5)


def test_each_input_gradient_is_held_against_the_forward_of_its_own_micro_batch() -> None:
    memory = MadeUpMemory(total=8000 * MB, static=STATIC)
    meter = MemoryMeter(memory, 0.9, settled_iterations=0)
    meter.begin(0)
    nbytes = {0: 100 * MB, 1: 200 * MB, 2: 300 * MB}
    for step in ["F0", "F1", "F2", "B0", "I1", "I2", "W1", "W2"]:
        kind, micro_batch = Kind(step[0]), int(step[1])
        meter.before()
        memory.allocate(round({"F": 1, "B": -1, "I": -0.5, "W": -0.5}[kind] * nbytes[micro_batch]))
        meter.after(kind, 0)
    report = meter.finish(0)
    assert report is not None
    assert report.activation_nbytes == pytest.approx(280 * MB), "0.9 quantile"
    assert report.released_at_backward_input == pytest.approx(1 - 145 / 280)


def test_torchs_allocator_tells_growth_by_what_is_allocated_and_the_peak_by_what_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2}},
        "active_bytes": {"all": {"current": 3, "peak": 4}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: reported)
    memory = CudaMemory(torch.device("cuda", 0))
    assert (memory.allocated_nbytes(), memory.peak_nbytes()) == (1, 4)
    reported["active_bytes"]["all"]["peak"] = 0
    assert memory.peak_nbytes() == 2, "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_expandable_segments_are_recommended_once(
    environment: dict[str, str], said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="adaptra_megatron"):
        assert memory_of(torch.device("cpu")) is None
        assert isinstance(memory_of(torch.device("cuda", 0)), CudaMemory)
    assert len(caplog.messages) == said
    assert all("expandable_segments:True" in message for message in caplog.messages)


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


def reported(room: float, released: float | None = None) -> StageMemory:
    return StageMemory(room, 1e8, 1e9, released)


def test_caps_fall_at_once_and_rise_after_a_while_and_not_for_a_little() -> None:
    caps = MeasuredCaps()
    caps.observe([(0, None), (1, reported(8.9))])
    assert caps.rooms == {1: 8}
    caps.observe([(1, reported(7.99))])
    assert caps.rooms == {1: 7}
    for room in [8.1] * 20 + [9.5] * (RISE_AFTER - 1) + [7.2] + [9.5, 8.6] * (RISE_AFTER // 2 - 1) + [9.5]:
        caps.observe([(1, reported(room))])
        assert caps.rooms == {1: 7}, room
    caps.observe([(1, reported(9.5))])
    assert caps.rooms == {1: 8}, "no more than there was all the time"


def test_the_replica_with_the_least_room_counts_and_the_least_released_fraction() -> None:
    caps = MeasuredCaps()
    assert caps.released_at_backward_input(2) == (0.0, 0.0)
    caps.observe([(0, reported(8.0, 0.7)), (0, reported(5.0, 0.55)), (1, reported(9.0)), (1, None)])
    assert caps.rooms == {0: 5, 1: 9}
    assert caps.released_at_backward_input(2) == (0.5, 0.0), "stage 1 has not reported"
    caps.observe([(1, reported(9.0, -0.7)), (0, reported(8.0, 0.8))])
    assert caps.released_at_backward_input(2) == (0.5, -0.75), "in eighths, rounded down; once reported never more"
    assert caps.short_of((5.0, 9.0)) is None
    assert caps.short_of((None, 9.5)) == "stage 1 may hold 9.5 activations of 100.0 MB, but has memory for 9"
    assert caps.figures((4.0, 9.0))[0].cap == 4.0
