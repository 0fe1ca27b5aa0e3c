# SPDX-License-Identifier: Apache-2.0
"""Valid schedules pass; each way to break one is reported for what it is, where it is."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.schedules import random_schedules, with_pairs

from adaptra_megatron.schedule import classic
from adaptra_megatron.schedule.classic import delay_weights, split_backward
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule, units
from adaptra_megatron.schedule.schedule_checks import ScheduleError, check_schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@st.composite
def schedules(draw: st.DrawFn, *, split: bool | None = None, min_stages: int = 1) -> Schedule:
    """Random valid schedules: what a random scheduler, stage after stage, happens to run when its inputs are there."""
    stages = draw(st.integers(min_stages, 4))
    chunks = draw(st.integers(1, 3))
    micro_batches = draw(st.integers(1, 4))
    splits = draw(st.booleans()) if split is None else split
    random = draw(st.randoms(use_true_random=False))
    last = stages * chunks - 1
    forwards, backwards, weights = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    whole: set[tuple[int, int]] = set()
    orders: list[list[Action]] = [[] for _ in range(stages)]
    while True:
        ready: list[tuple[int, Kind]] = []
        for virtual in range(last + 1):
            while (virtual, weights[virtual]) in whole:
                weights[virtual] += 1
            if forwards[virtual] < (micro_batches if virtual == 0 else forwards[virtual - 1]):
                ready.append((virtual, Kind.FORWARD))
            if backwards[virtual] < (forwards[last] if virtual == last else backwards[virtual + 1]):
                # A whole backward would overtake the weight gradients that are due.
                split_now = splits and (weights[virtual] < backwards[virtual] or random.random() < 0.8)
                ready.append((virtual, Kind.BACKWARD_INPUT if split_now else Kind.BACKWARD))
            if weights[virtual] < backwards[virtual]:
                ready.append((virtual, Kind.BACKWARD_WEIGHT))
        if not ready:
            break
        virtual, kind = random.choice(ready)
        done = {Kind.FORWARD: forwards, Kind.BACKWARD_WEIGHT: weights}.get(kind, backwards)
        if kind is Kind.BACKWARD:
            whole.add((virtual, done[virtual]))
        orders[virtual % stages].append(Action(virtual % stages, kind, virtual // stages, done[virtual]))
        done[virtual] += 1
    return Schedule(stages=stages, chunks=chunks, micro_batches=micro_batches, orders=tuple(map(tuple, orders)))


def with_order(schedule: Schedule, stage: int, order: list[Action] | Order) -> Schedule:
    return replace(schedule, orders=tuple(tuple(order) if s == stage else o for s, o in enumerate(schedule.orders)))


def pick(data: st.DataObject, schedule: Schedule, kinds: tuple[Kind, ...] = tuple(Kind)) -> tuple[int, Action]:
    """A random action of one of `kinds` and its position in its stage's order."""
    found = [(i, a) for order in schedule.orders for i, a in enumerate(order) if a.kind in kinds]
    assume(found)
    return data.draw(st.sampled_from(found))


def error_of(schedule: Schedule, **limits: object) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule, **limits)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


def in_flight_peaks(schedule: Schedule, released: float) -> list[float]:
    gives = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.BACKWARD_INPUT: -released,
        Kind.BACKWARD_WEIGHT: released - 1.0,
    }
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for action in order:
            held += gives[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@given(schedules(), st.floats(-2.0, 1.0))
def test_valid_schedules_pass_with_their_own_peaks_as_caps(schedule: Schedule, released: float) -> None:
    check_schedule(schedule)
    peaks = in_flight_peaks(schedule, released)
    check_schedule(schedule, max_in_flight=peaks, released_at_backward_input=released)
    check_schedule(schedule, max_in_flight=[None] * schedule.stages)


@given(schedules(), st.floats(-2.0, 1.0), st.data())
def test_a_cap_passed_is_reported_where_it_is_passed(schedule: Schedule, released: float, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    peak = in_flight_peaks(schedule, released)[stage]
    cap = peak - 0.01
    caps = [cap if s == stage else None for s in range(schedule.stages)]
    error = error_of(schedule, max_in_flight=caps, released_at_backward_input=released)
    assert error.stage == stage
    assert error.action is not None
    position = schedule.orders[stage].index(error.action)
    cut = with_order(schedule, stage, schedule.orders[stage][: position + 1])
    assert in_flight_peaks(cut, released)[stage] > cap
    before = with_order(schedule, stage, schedule.orders[stage][:position])
    assert in_flight_peaks(before, released)[stage] <= cap + 1e-9
    assert f"position {position} of stage {stage}" in str(error)
    assert f"its cap is {cap:g}" in str(error)


@given(schedules(), st.data())
def test_a_missing_action_is_named(schedule: Schedule, data: st.DataObject) -> None:
    position, action = pick(data, schedule)
    order = list(schedule.orders[action.stage])
    del order[position]
    error = error_of(with_order(schedule, action.stage, order))
    assert "is missing" in str(error)
    assert error.action is not None
    assert (error.stage, error.action.chunk, error.action.micro_batch) == (
        action.stage,
        action.chunk,
        action.micro_batch,
    )
    assert (error.action.kind in BACKWARDS) == (action.kind in BACKWARDS)
    assert (error.action.kind is Kind.FORWARD) == (action.kind is Kind.FORWARD)


@given(schedules(), st.data())
def test_a_doubled_action_is_named(schedule: Schedule, data: st.DataObject) -> None:
    position, action = pick(data, schedule, (Kind.FORWARD, *BACKWARDS, Kind.BACKWARD_WEIGHT))
    order = list(schedule.orders[action.stage])
    again = data.draw(st.integers(position + 1, len(order)))
    order.insert(again, action)
    error = error_of(with_order(schedule, action.stage, order))
    assert (error.stage, error.action) == (action.stage, action)
    assert f"position {again} of stage {action.stage}'s order, runs a second time" in str(error)


@given(schedules(), st.data())
def test_an_unknown_micro_batch_or_chunk_is_named(schedule: Schedule, data: st.DataObject) -> None:
    position, action = pick(data, schedule)
    field, count = data.draw(st.sampled_from([("micro_batch", schedule.micro_batches), ("chunk", schedule.chunks)]))
    wrong = action._replace(**{field: data.draw(st.sampled_from([-1, count, count + 7]))})
    order = list(schedule.orders[action.stage])
    order[position] = wrong
    error = error_of(with_order(schedule, action.stage, order))
    assert (error.stage, error.action) == (action.stage, wrong)
    assert f"known are 0..{count - 1}" in str(error)


@given(schedules(min_stages=2), st.data())
def test_an_action_in_another_stages_order_is_named(schedule: Schedule, data: st.DataObject) -> None:
    _, action = pick(data, schedule)
    other = (action.stage + 1) % schedule.stages
    order = list(schedule.orders[other])
    order.insert(data.draw(st.integers(0, len(order))), action)
    error = error_of(with_order(schedule, other, order))
    assert (error.stage, error.action) == (other, action)
    assert f"move it to stage {action.stage}'s" in str(error)


@given(schedules(), st.data())
def test_a_backward_before_its_forward_is_named(schedule: Schedule, data: st.DataObject) -> None:
    """The first backward of a chunk is moved in front of the forward it needs."""
    stage = data.draw(st.integers(0, schedule.stages - 1))
    chunk = data.draw(st.integers(0, schedule.chunks - 1))
    order = list(schedule.orders[stage])
    backward = next(a for a in order if a.kind in BACKWARDS and a.chunk == chunk)
    forward = next(a for a in order if a.kind is Kind.FORWARD and a.chunk == chunk)
    order.remove(backward)
    order.insert(data.draw(st.integers(0, order.index(forward))), backward)
    error = error_of(with_order(schedule, stage, order))
    assert (error.stage, error.action) == (stage, backward)
    assert f"comes before {forward}, which it needs" in str(error)


@given(schedules(split=True), st.data())
def test_a_weight_before_its_input_gradient_is_named(schedule: Schedule, data: st.DataObject) -> None:
    _, weight = pick(data, schedule, (Kind.BACKWARD_WEIGHT,))
    order = list(schedule.orders[weight.stage])
    needed = weight._replace(kind=Kind.BACKWARD_INPUT)
    order.remove(weight)
    order.insert(data.draw(st.integers(0, order.index(needed))), weight)
    error = error_of(with_order(schedule, weight.stage, order))
    assert (error.stage, error.action) == (weight.stage, weight)
    assert f"comes before {needed}, which it needs" in str(error)


@given(schedules(split=False), st.data())
def test_a_weight_after_a_whole_backward_is_named(schedule: Schedule, data: st.DataObject) -> None:
    position, backward = pick(data, schedule, (Kind.BACKWARD,))
    weight = backward._replace(kind=Kind.BACKWARD_WEIGHT)
    order = list(schedule.orders[backward.stage])
    order.insert(data.draw(st.integers(position + 1, len(order))), weight)
    error = error_of(with_order(schedule, backward.stage, order))
    assert (error.stage, error.action) == (backward.stage, weight)
    assert "has no input gradient (I) of its own" in str(error)


@given(schedules(split=True), st.data())
def test_an_input_gradient_without_weight_gradient_is_named(schedule: Schedule, data: st.DataObject) -> None:
    """A chunk's last weight gradient goes: nothing later in the order can stand for it."""
    stage = data.draw(st.integers(0, schedule.stages - 1))
    order = list(schedule.orders[stage])
    weights = [a for a in order if a.kind is Kind.BACKWARD_WEIGHT]
    assume(weights)
    last = weights[-1]
    order.remove(last)
    error = error_of(with_order(schedule, stage, order))
    assert (error.stage, error.action) == (stage, last)
    assert "its input gradient (I) runs, so add its weight gradient (W)" in str(error)


@given(schedules(), st.data())
def test_micro_batches_out_of_order_are_named(schedule: Schedule, data: st.DataObject) -> None:
    """Two neighbours of one kind and chunk change places."""
    kinds = data.draw(st.sampled_from([(Kind.FORWARD,), (Kind.BACKWARD,), (Kind.BACKWARD_WEIGHT,)]))
    _, first = pick(data, schedule, kinds)
    order = list(schedule.orders[first.stage])
    second = first._replace(micro_batch=first.micro_batch + 1)
    assume(second in order)
    here, there = order.index(first), order.index(second)
    assume(first.kind is not Kind.BACKWARD_WEIGHT or second._replace(kind=Kind.BACKWARD_INPUT) in order[:here])
    order[here], order[there] = second, first
    error = error_of(with_order(schedule, first.stage, order))
    assert (error.stage, error.action) == (first.stage, second)
    assert f"comes before {first}: each kind of action of a chunk must run in ascending" in str(error)


@given(st.integers(3, 6), st.integers(2, 5), st.data())
def test_a_deadlock_names_the_waiting_stages(stages: int, extra: int, data: st.DataObject) -> None:
    """Stage `s` runs the backward of micro-batch 0 in front of a forward that this backward needs downstream."""
    schedule = classic.one_f_one_b(stages, stages + extra)
    stage = data.draw(st.integers(0, stages - 3))
    order = [a for a in schedule.orders[stage] if a.kind is Kind.FORWARD]
    backwards = [a for a in schedule.orders[stage] if a.kind is Kind.BACKWARD]
    lower = schedule.orders[stage + 1]
    first_backward = next(a for a in lower if a.kind is Kind.BACKWARD)
    forwards_needed = lower.index(first_backward)
    waiting = order[forwards_needed - 1]
    broken = [*order[: forwards_needed - 1], backwards[0], *order[forwards_needed - 1 :], *backwards[1:]]
    error = error_of(with_order(schedule, stage, broken))
    message = str(error)
    assert message.startswith("deadlock")
    assert f"{backwards[0]} waits for {first_backward}" in message
    assert f"{waiting._replace(stage=stage + 1)} waits for {waiting}" in message
    assert error.action in (backwards[0], waiting._replace(stage=stage + 1))


def test_a_deadlock_around_the_ring_of_chunks_names_every_stage_of_it() -> None:
    schedule = classic.gpipe(3, 1, chunks=2)
    first = schedule.orders[0]
    error = error_of(with_order(schedule, 0, (first[1], first[0], *first[2:])))
    assert str(error) == (
        "deadlock, each of these comes, in its stage's order, before what the next one waits for: "
        "stage 0 F(micro-batch 0, chunk 1) waits for stage 2 F(micro-batch 0, chunk 0); "
        "stage 2 F(micro-batch 0, chunk 0) waits for stage 1 F(micro-batch 0, chunk 0); "
        "stage 1 F(micro-batch 0, chunk 0) waits for stage 0 F(micro-batch 0, chunk 0). "
        "Move stage 0 F(micro-batch 0, chunk 0) in front of stage 0 F(micro-batch 0, chunk 1)"
    )


def test_a_stage_can_deadlock_on_its_own() -> None:
    order = [Action(0, Kind.FORWARD, chunk, 0) for chunk in (1, 0)] + [Action(0, Kind.BACKWARD, c, 0) for c in (1, 0)]
    error = error_of(Schedule(stages=1, chunks=2, micro_batches=1, orders=(tuple(order),)))
    assert "stage 0 F(micro-batch 0, chunk 1) waits for stage 0 F(micro-batch 0, chunk 0)." in str(error)


def can_run(schedule: Schedule) -> bool:
    """Each round every stage starts what it runs next if all that its halves need has ended."""
    placement, left = schedule.placement, [list(units(order)) for order in schedule.orders]
    ended: set[tuple[str, int, int]] = set()

    def needed(action: Action) -> tuple[str, int, int] | None:
        virtual = placement.virtual_stage(action.stage, action.chunk)
        if action.kind is Kind.BACKWARD_WEIGHT:
            return ("B", virtual, action.micro_batch)
        if action.kind is Kind.FORWARD:
            return ("F", virtual - 1, action.micro_batch) if virtual else None
        last = virtual + 1 == schedule.virtual_stages
        return ("F" if last else "B", virtual + (not last), action.micro_batch)

    while any(left):
        able = [stage for stage, order in enumerate(left) if order and {*map(needed, order[0])} <= {*ended, None}]
        if not able:
            return False
        for action in (action for stage in able for action in left[stage].pop(0)):
            if action.kind is not Kind.BACKWARD_WEIGHT:
                virtual = placement.virtual_stage(action.stage, action.chunk)
                ended.add(("F" if action.kind is Kind.FORWARD else "B", virtual, action.micro_batch))
    return True


@given(random_schedules(placed=True), st.randoms(use_true_random=False))
def test_combined_actions_pass_just_where_both_halves_can_start_at_once(schedule: Schedule, choice: Random) -> None:
    schedule = with_pairs(schedule, choice)
    if can_run(schedule):
        check_schedule(schedule)
    else:
        error = error_of(schedule)
        assert ("deadlock" in str(error)) != ("its own backward" in str(error))
        assert "separate" in str(error).lower()
    assert can_run(schedule.separated())


def test_a_mark_in_the_wrong_place_is_named() -> None:
    order = classic.one_f_one_b(1, 2).orders[0]  # F0 B0 F1 B1

    def marked(place: int, kinds: str = "FBFB") -> str:
        changed = [action._replace(kind=Kind(kind)) for action, kind in zip(order, kinds, strict=True)]
        changed[place] = changed[place]._replace(combined=True)
        return str(error_of(with_order(classic.one_f_one_b(1, 2), 0, changed)))

    assert "position 0 of stage 0's order, is combined with its own backward" in marked(0)
    for place, kinds in ((1, "FBFB"), (3, "FBFB"), (0, "FFBB"), (0, "FWFB")):
        assert f"position {place} of stage 0's order, is marked as combined: only a forward" in marked(place, kinds)


def test_a_deadlock_of_combined_actions_says_that_they_may_be_separated() -> None:
    """Stage 1 needs F1 before it makes what stage 0 needs to start the action that F1 is a half of."""
    schedule = classic.one_f_one_b(2, 2)
    first, last = schedule.orders[0], schedule.orders[1]  # F0 F1 B0 B1, F0 B0 F1 B1
    combined = with_order(schedule, 0, [first[0], first[1]._replace(combined=True), *first[2:]])
    check_schedule(combined)
    error = error_of(with_order(combined, 1, [last[0], last[2], last[1], last[3]]))
    assert "stage 0 B(micro-batch 0, chunk 0) waits for stage 1 B(micro-batch 0, chunk 0)" in str(error)
    assert "Separate combined actions of these stages, or move stage 0 F(micro-batch 1, chunk 0)" in str(error)


def test_a_wrong_frame_is_reported() -> None:
    schedule = classic.one_f_one_b(2, 2)
    assert "has 2 orders for 3 stages" in str(error_of(replace(schedule, stages=3)))
    assert "chunks of the schedule must be at least 1, got 0" in str(error_of(replace(schedule, chunks=0)))
    assert "max_in_flight has 1 entries for 2 stages" in str(error_of(schedule, max_in_flight=[2]))


def test_evaluation_orders_lack_backwards() -> None:
    error = error_of(classic.forward_only(2, 2))
    assert error.action == Action(0, Kind.BACKWARD, 0, 0)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_weight_delays_of_any_size_stay_valid(stages: int, micro_batches: int, data: st.DataObject) -> None:
    delays = data.draw(st.lists(st.none() | st.integers(0, 9), min_size=stages, max_size=stages))
    check_schedule(delay_weights(classic.one_f_one_b(stages, micro_batches), delays))


def test_the_time_of_a_check_grows_with_the_number_of_actions() -> None:
    """And no faster: at most half as much again, in a schedule of 64 stages with 4 times as many micro-batches."""
    lasted_s = []
    for micro_batches in (256, 1024):
        schedule, tries_s = classic.zb_h1(64, micro_batches), []
        for _ in range(5):
            start_s = time.thread_time()
            check_schedule(schedule, max_in_flight=[64] * 64)
            tries_s.append(time.thread_time() - start_s)
        lasted_s.append(min(tries_s))
    assert lasted_s[1] < 1.5 * 4 * lasted_s[0]


def test_whole_backward_must_not_overtake_a_pending_weight_gradient() -> None:
    split = split_backward(classic.one_f_one_b(2, 4), delay=1)
    left = Action(1, Kind.BACKWARD_INPUT, 0, 2)
    dropped = left._replace(kind=Kind.BACKWARD_WEIGHT)
    whole = left._replace(kind=Kind.BACKWARD)
    order = tuple(whole if action == left else action for action in split.orders[1] if action != dropped)
    with pytest.raises(ScheduleError, match=r"stage 1 B\(micro-batch 2.* overtakes stage 1 W\(micro-batch 1"):
        check_schedule(replace(split, orders=(split.orders[0], order)))
