# SPDX-License-Identifier: Apache-2.0
"""Ranks of actions respect what they need of each other, and every receive is posted in time and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import classic_schedules, random_schedules

from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.launch_order import launch_ranks, receives_before
from adaptra_megatron.schedule.routing import Message, needed, produced, sent_to

schedules = st.one_of(classic_schedules(), random_schedules())


@st.composite
def schedules_and_costs(draw: st.DrawFn) -> tuple[Schedule, Costs | None]:
    """Costs of zero and of very different sizes among them."""
    schedule = draw(schedules)
    stages, chunks = schedule.stages, schedule.chunks
    seconds = st.sampled_from([0.0, 1e-6, 0.01, 0.02, 3.0])

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(seconds) for _ in range(chunks)) for _ in range(stages))

    if draw(st.booleans()):
        return schedule, None
    ring = {(a, b) for a in range(stages) for b in ((a + 1) % stages, (a - 1) % stages) if a != b}
    links = {
        link: LinkCost(draw(seconds), draw(seconds), draw(st.booleans()))
        for link in sorted(ring)
        if draw(st.booleans())
    }
    costs = Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=schedule.micro_batches,
        forward_s=table(),
        backward_input_s=table(),
        backward_weight_s=table(),
        links=links,
        shared_queue=draw(st.booleans()),
    )
    return schedule, costs


@given(schedules_and_costs())
def test_ranks_are_one_order_that_keeps_the_stages_orders_and_what_actions_need(
    case: tuple[Schedule, Costs | None],
) -> None:
    schedule, costs = case
    ranks = launch_ranks(schedule, costs)
    assert sorted(rank for row in ranks for rank in row) == list(range(sum(map(len, schedule.orders))))
    assert all(list(row) == sorted(row) for row in ranks)
    made = {
        message: ranks[stage][index]
        for stage, order in enumerate(schedule.orders)
        for index, action in enumerate(order)
        if (message := produced(action, schedule.stages, schedule.chunks)) is not None
    }
    for stage, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            message = needed(action, schedule.stages, schedule.chunks)
            assert message is None or made[message] < ranks[stage][index]


@given(schedules_and_costs())
def test_receives_are_posted_once_by_rank_before_what_needs_them_and_in_the_order_of_each_sender(
    case: tuple[Schedule, Costs | None],
) -> None:
    schedule, costs = case
    stages, chunks = schedule.stages, schedule.chunks
    ranks = launch_ranks(schedule, costs)
    for stage, order in enumerate(schedule.orders):
        batches = receives_before(schedule, stage, ranks)
        assert len(batches) == len(order)
        posted: list[Message] = []
        for action, batch in zip(order, batches, strict=True):
            posted += batch
            message = needed(action, stages, chunks)
            assert message is None or message in posted or message.source == stage
        for peer in range(stages):
            if peer != stage:
                assert [each for each in posted if each.source == peer] == sent_to(
                    schedule.orders[peer], stage, stages, chunks
                )
        received = {
            message for action in order if (message := needed(action, stages, chunks)) and message.source != stage
        }
        assert len(posted) == len(received)
        assert set(posted) == received


def test_a_receive_is_posted_before_what_runs_when_its_message_is_made() -> None:
    """Stock's order on two stages, gradients late: stage 1 ends B1 during stage 0's F2, and B2 before its B2."""
    schedule = one_f_one_b(2, 3)
    late = {(1, 0): LinkCost(0.25)}
    costs = uniform_costs(2, 3, forward_s=1.5, backward_input_s=1.0, backward_weight_s=1.0, links=late)
    batches = receives_before(schedule, 0, launch_ranks(schedule, costs))
    told = {
        f"{action.kind}{action.micro_batch}": [message.micro_batch for message in batch]
        for action, batch in zip(schedule.orders[0], batches, strict=True)
    }
    assert told == {"F0": [], "F1": [], "B0": [0], "F2": [1], "B1": [], "B2": [2]}
