# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_blocking import replay_blocking
from reference_device import DeviceReference
from reference_simulator import OnlineReference, random_costs, reference_replay
from support.schedules import with_pairs, with_pairs_that_run

from adaptra_megatron.schedule.classic import gpipe, interleaved, interleaved_combined, one_f_one_b
from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost, uniform_costs, uniform_costs_for
from adaptra_megatron.schedule.ir import Action, Kind, Schedule, ScheduleError
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import Simulation, SimulationError, peak_in_flight, simulate, simulate_online
from adaptra_megatron.schedule.transfers.launch_order import launch_ranks


def slow_both_ways(first: int, latency_s: float, occupancy_s: float = 0.0) -> dict[tuple[int, int], LinkCost]:
    cost = LinkCost(latency_s, occupancy_s)
    return {(first, first + 1): cost, (first + 1, first): cost}


def whole_backwards(schedule: Schedule) -> Schedule:
    """The schedule with B where I was and no W."""
    orders = tuple(
        tuple(
            action._replace(kind=Kind.BACKWARD) if action.kind is Kind.BACKWARD_INPUT else action
            for action in order
            if action.kind is not Kind.BACKWARD_WEIGHT
        )
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, orders=orders)


def assert_agree(simulation: Simulation, reference: tuple[list[list[float]], list[list[float]]]) -> None:
    starts, ends = reference
    assert simulation.start_s == tuple(map(tuple, starts))
    assert simulation.end_s == tuple(map(tuple, ends))
    assert simulation.makespan_s == max(stage_ends[-1] for stage_ends in ends)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), costs=random_costs(varied=True, added=True, whole=True, placed=True))
def test_replay_agrees_with_the_reference(data: st.DataObject, costs: Costs) -> None:
    seed = data.draw(st.integers(0, 2**32))
    other = _shuffled(costs, random.Random(seed))
    schedule = simulate_online(other).schedule
    if data.draw(st.booleans()):
        schedule = whole_backwards(schedule)
    reference = reference_replay(schedule, costs)
    assert reference is not None
    assert_agree(simulate(schedule, costs), reference)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), costs=random_costs(varied=True, whole=True, rendezvous=True, placed=True))
def test_replay_over_rendezvous_links_agrees_with_hosts_and_devices(data: st.DataObject, costs: Costs) -> None:
    """With separate queues it is the ordinary replay: the launch order posts every receive in time."""
    schedule = simulate_online(_shuffled(costs, random.Random(data.draw(st.integers(0, 2**32))))).schedule
    if data.draw(st.booleans()):
        schedule = whole_backwards(schedule)
    starts, ends = DeviceReference(schedule, costs, launch_ranks(schedule, costs)).run()
    found = simulate(schedule, costs)
    for mine, others in ((found.start_s, starts), (found.end_s, ends)):
        for row, other in zip(mine, others, strict=True):
            assert row == pytest.approx(other, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), costs=random_costs(varied=True, added=True, whole=True, placed=True, combined=True))
def test_combined_actions_agree_with_the_reference(data: st.DataObject, costs: Costs) -> None:
    """Also where they cannot run: a pair may need what only its own forward leads to."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    schedule = simulate_online(_shuffled(costs, rng)).schedule.separated()
    schedule = with_pairs(whole_backwards(schedule) if rng.random() < 0.5 else schedule, rng)
    reference = reference_replay(schedule, costs)
    if reference is None:
        with pytest.raises(SimulationError, match="for ever"):
            simulate(schedule, costs)
    else:
        assert_agree(simulate(schedule, costs), reference)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), costs=random_costs(varied=True, whole=True, rendezvous=True, placed=True, combined=True))
def test_combined_actions_agree_with_hosts_and_devices(data: st.DataObject, costs: Costs) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    schedule = with_pairs_that_run(simulate_online(_shuffled(costs, rng)).schedule.separated(), rng)
    starts, ends = DeviceReference(schedule, costs, launch_ranks(schedule, costs)).run()
    found = simulate(schedule, costs)
    for mine, others in ((found.start_s, starts), (found.end_s, ends)):
        for row, other in zip(mine, others, strict=True):
            assert row == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize(("stages", "link_s"), [(2, 1.0), (3, 2.0)])
def test_receives_behind_a_combined_action_start_late(stages: int, link_s: float) -> None:
    """Messages leave early in combined actions: a receive posted behind one starts after its message was made."""
    schedule = interleaved_combined(stages, 2 * stages, 2)
    pairs = [(stage, (stage + step) % stages) for stage in range(stages) for step in (1, -1)]
    costs = dataclasses.replace(
        uniform_costs_for(schedule),
        links=dict.fromkeys(pairs, LinkCost(occupancy_s=link_s, rendezvous=True)),
        combined_saving=(((0.0,) * 2,) * 2,) * stages,
        combined_sends_at=0.25,
    )
    starts, ends = DeviceReference(schedule, costs, launch_ranks(schedule, costs)).run()
    found = simulate(schedule, costs)
    assert (found.start_s, found.end_s) == (tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _shuffled(costs: Costs, rng: random.Random) -> Costs:
    """Other costs of the same shape, so that the orders dispatched under them are not those that suit `costs`."""

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(rng.random() for _ in range(costs.chunks)) for _ in range(costs.stages))

    return Costs(
        stages=costs.stages,
        chunks=costs.chunks,
        micro_batches=costs.micro_batches,
        forward_s=table(),
        backward_input_s=table(),
        backward_weight_s=table(),
        max_in_flight=costs.max_in_flight,
        released_at_backward_input=costs.released_at_backward_input,
        custom_placement=costs.custom_placement,
    )


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), costs=random_costs(max_stages=3, max_micro_batches=2, max_chunks=2, placed=True))
def test_replay_deadlocks_when_the_reference_does(seed: int, costs: Costs) -> None:
    rng = random.Random(seed)
    orders = []
    for order in simulate_online(costs).schedule.orders:
        shuffled = list(order)
        for _ in range(rng.randint(0, 4)):
            first, second = rng.randrange(len(order)), rng.randrange(len(order))
            shuffled[first], shuffled[second] = shuffled[second], shuffled[first]
        orders.append(tuple(shuffled))
    schedule = dataclasses.replace(simulate_online(costs).schedule, orders=tuple(orders))
    reference = reference_replay(schedule, costs)
    if reference is None:
        with pytest.raises(SimulationError, match="for ever"):
            simulate(schedule, costs)
    else:
        assert_agree(simulate(schedule, costs), reference)


@settings(max_examples=80, deadline=None)
@given(
    costs=st.booleans().flatmap(
        lambda combined: random_costs(varied=True, added=True, whole=True, placed=True, combined=combined)
    )
)
def test_online_dispatch_agrees_with_the_reference(costs: Costs) -> None:
    online = simulate_online(costs)
    group = _group(costs)
    done, starts = OnlineReference(costs, group).run()
    assert online.schedule.orders == tuple(map(tuple, done))
    assert online.start_s == tuple(map(tuple, starts))


def _group(costs: Costs) -> int:
    """The largest group, up to one micro-batch per stage, for which (chunks - 1) groups and one more fit all caps."""
    group = min(costs.stages, costs.micro_batches)
    for released, cap in zip(costs.released_at_backward_input, costs.max_in_flight, strict=True):
        added = max(0.0, -released)
        if cap is None or costs.chunks + added > cap + 1e-9:  # what runs whole adds nothing
            added = 0.0
        while group > 1 and cap is not None and (costs.chunks - 1) * group + 1 + added > cap + 1e-9:
            group -= 1
    return group


@settings(max_examples=80, deadline=None)
@given(
    costs=random_costs(
        varied=True,
        max_stages=8,
        max_micro_batches=12,
        max_chunks=4,
        added=True,
        whole=True,
        placed=True,
        combined=True,
    )
)
def test_online_dispatch_never_deadlocks_and_keeps_caps(costs: Costs) -> None:
    online = simulate_online(costs)
    released = costs.released_at_backward_input
    check_schedule(online.schedule, max_in_flight=costs.max_in_flight, released_at_backward_input=released)
    assert simulate(online.schedule, costs).makespan_s == online.makespan_s


def test_hand_made_example() -> None:
    """Two stages, one micro-batch: F 1, B 2, W 4 s; 0->1 takes 10 + 100 s, 1->0 1000 s."""
    costs = uniform_costs(
        2,
        1,
        forward_s=1.0,
        backward_input_s=2.0,
        backward_weight_s=4.0,
        links={(0, 1): LinkCost(10.0, 100.0), (1, 0): LinkCost(1000.0, 0.0)},
    )
    online = simulate_online(costs)
    assert online.start_s == ((0.0, 1114.0, 1116.0), (111.0, 112.0, 114.0))
    assert online.makespan_s == 1120.0
    assert online.peak_in_flight == (1.0, 1.0)
    assert online.bubble_fraction == (1.0 - 7.0 / 1120.0, 1.0 - 7.0 / 1120.0)


def test_one_f_one_b_takes_the_known_time() -> None:
    costs = uniform_costs(8, 24, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    simulation = simulate(one_f_one_b(8, 24), costs)
    assert simulation.makespan_s == pytest.approx((24 + 7) * 0.06)
    assert simulation.peak_in_flight == (8, 7, 6, 5, 4, 3, 2, 1)


def test_messages_queue_on_a_busy_link() -> None:
    costs = uniform_costs(
        2, 3, forward_s=1.0, backward_input_s=0.0, backward_weight_s=0.0, links={(0, 1): LinkCost(7.0, 5.0)}
    )
    forwards = [start for start, action in _of_stage(simulate_online(costs), 1) if action.kind is Kind.FORWARD]
    assert forwards == [13.0, 18.0, 23.0]


def test_two_stages_share_one_link_between_chunks() -> None:
    """With two stages, activations of chunk 0 and gradients of chunk 1 leave stage 0 on the same link."""
    costs = uniform_costs(
        2, 1, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=9.0, links={(0, 1): LinkCost(0.0, 5.0)}
    )
    orders = tuple(
        tuple(
            Action(stage, kind, chunk, 0)
            for kind, chunk in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0))
        )
        for stage in range(2)
    )
    simulation = simulate(Schedule(stages=2, chunks=2, micro_batches=1, orders=orders), costs)
    # Stage 0: F0 0-1, F1 7-8; stage 1: F0 6-7, F1 13-14, B1 14-24, B0; the gradient of B1 on stage 0 takes 5 s more.
    assert simulation.start_s == ((0.0, 7.0, 24.0, 49.0), (6.0, 13.0, 14.0, 39.0))


def _of_stage(simulation: Simulation, stage: int) -> list[tuple[float, Action]]:
    return list(zip(simulation.start_s[stage], simulation.schedule.orders[stage], strict=True))


def test_deadlock_names_who_waits_for_what() -> None:
    good = one_f_one_b(2, 2)
    last = good.orders[1]
    swapped = Schedule(stages=2, chunks=1, micro_batches=2, orders=(good.orders[0], (last[1], last[0], *last[2:])))
    costs = uniform_costs(2, 2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(SimulationError) as error:
        simulate(swapped, costs)
    assert "stage 1 B(micro-batch 0, chunk 0) waits for stage 1 F(micro-batch 0, chunk 0)" in str(error.value)
    assert "stage 0 B(micro-batch 0, chunk 0) waits for stage 1 B(micro-batch 0, chunk 0)" in str(error.value)


def test_schedule_and_costs_must_fit() -> None:
    costs = uniform_costs(2, 3, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(SimulationError, match="the schedule has 2 micro_batches, the costs have 3"):
        simulate(one_f_one_b(2, 2), costs)
    good = one_f_one_b(2, 3)
    stray = good.orders[0][0]._replace(micro_batch=3)
    bad = Schedule(stages=2, chunks=1, micro_batches=3, orders=((stray, *good.orders[0]), good.orders[1]))
    with pytest.raises(SimulationError, match="micro-batch 3, chunk 0.* is outside"):
        simulate(bad, costs)


def test_online_refuses_a_cap_without_room_for_every_chunk() -> None:
    costs = uniform_costs(2, 3, chunks=3, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, max_in_flight=2.5)
    with pytest.raises(CostError, match="stage 0 is 2.5, but 3 chunks need at least 3"):
        simulate_online(costs)


def test_peak_counts_what_input_gradients_release() -> None:
    kinds = (Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.FORWARD, Kind.BACKWARD_WEIGHT, Kind.FORWARD)
    counts = dict.fromkeys(Kind, 0)
    order = []
    for kind in kinds:
        order.append(Action(0, kind, 0, counts[kind]))
        counts[kind] += 1
    schedule = Schedule(stages=1, chunks=1, micro_batches=4, orders=(tuple(order),))
    assert peak_in_flight(schedule, 0.0) == (3.0,)
    assert peak_in_flight(schedule, 0.75) == (3.0,)
    assert peak_in_flight(schedule, 1.0) == (3.0,)
    assert peak_in_flight(Schedule(stages=1, chunks=1, micro_batches=4, orders=(tuple(order[:4]),)), 0.75) == (2.25,)


@settings(max_examples=60, deadline=None)
@given(costs=random_costs(varied=True, max_chunks=1, max_stages=8, max_micro_batches=16))
def test_blocking_one_f_one_b_is_never_faster(costs: Costs) -> None:
    schedule = one_f_one_b(costs.stages, costs.micro_batches)
    free = simulate(schedule, costs)
    blocking = simulate(schedule, costs, blocking=True)
    assert blocking.makespan_s >= free.makespan_s * (1 - 1e-12)
    for starts, ends in zip(blocking.start_s, blocking.end_s, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert [list(map(list, times)) for times in (blocking.start_s, blocking.end_s)] == list(
        replay_blocking(schedule, costs)
    )


def test_blocking_one_f_one_b_by_hand() -> None:
    """Two stages, F = B = 1 s, 10 s both ways."""
    costs = uniform_costs(
        2, 3, forward_s=1.0, backward_input_s=1.0, backward_weight_s=0.0, links=slow_both_ways(0, 10.0)
    )
    simulation = simulate(one_f_one_b(2, 3), costs, blocking=True)
    # F0 is delivered at 11; the call that sends F1 at 12 also receives B0, which stage 1 sends at 13; F2 and B1 cross
    # at 25 and B2 leaves at 37.
    assert simulation.start_s == ((0.0, 11.0, 23.0, 24.0, 35.0, 47.0), (11.0, 12.0, 23.0, 24.0, 35.0, 36.0))


@pytest.mark.parametrize(("order", "saving"), [(interleaved, None), (interleaved_combined, 0.25)])
@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(3, 2, 6), (4, 2, 4), (4, 3, 12)])
def test_blocking_costs_nothing_when_links_are_free_and_stages_alike(
    stages: int, chunks: int, micro_batches: int, order: Callable[..., Schedule], saving: float | None
) -> None:
    costs = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        combined_saving=saving,
    )
    schedule = order(stages, micro_batches, chunks)
    free = simulate(schedule, costs)
    assert simulate(schedule, costs, blocking=True).makespan_s == free.makespan_s
    slow = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links=slow_both_ways(1, 2.0),
        combined_saving=saving,
    )
    blocking = simulate(schedule, slow, blocking=True)
    assert blocking.makespan_s > simulate(schedule, slow).makespan_s
    assert [list(map(list, times)) for times in (blocking.start_s, blocking.end_s)] == list(
        replay_blocking(schedule, slow)
    )


def test_blocking_is_defined_for_stock_orders_only() -> None:
    costs = uniform_costs(3, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(ScheduleError, match="not 1F1B"):
        simulate(gpipe(3, 4), costs, blocking=True)
    two = uniform_costs(2, 4, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(ScheduleError, match="more than 2 stages only"):
        simulate(interleaved(2, 4, 2), two, blocking=True)


def test_large_replay_is_fast_enough_to_plan_with() -> None:
    costs = uniform_costs(64, 256, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02, max_in_flight=96.0)
    simulation = simulate_online(costs)
    assert sum(map(len, simulation.schedule.orders)) == 64 * 256 * 3
    assert max(simulation.peak_in_flight) <= 96.0
    assert math.isclose(simulation.makespan_s, (63 + 3 * 256) * 0.02)
