# SPDX-License-Identifier: Apache-2.0
"""Ranks of actions respect what they need of each other, and every receive is posted in time and in order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import combined_schedules, named_schedules, random_schedules

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Order, Schedule
from adaptra_megatron.schedule.transfers.launch_order import (
    OrderedMessage,
    Posting,
    launch_ranks,
    needed,
    produced,
    receives_at_ends,
    receives_before,
    sent_to,
)

schedules = st.one_of(named_schedules(), random_schedules(), combined_schedules(placed=True))


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
    links = {
        link: LinkCost(draw(seconds), draw(seconds), draw(st.booleans()))
        for link in schedule.placement.links
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
        shared_queue=(shared := draw(st.booleans())),
        serial_queue=shared and draw(st.booleans()),
        custom_placement=schedule.custom_placement,
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
        if (message := produced(action, schedule.placement)) is not None
    }
    for stage, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            message = needed(action, schedule.placement)
            assert message is None or made[message] < ranks[stage][index]


@given(schedules_and_costs())
def test_receives_are_posted_once_by_rank_before_what_needs_them_and_in_the_order_of_each_sender(
    case: tuple[Schedule, Costs | None],
) -> None:
    schedule, costs = case
    ranks = launch_ranks(schedule, costs)
    for stage, order in enumerate(schedule.orders):
        for postings in (receives_before(schedule, stage, ranks), receives_at_ends(schedule, stage, costs)):
            check_posted(schedule, stage, order, postings)


def check_posted(schedule: Schedule, stage: int, order: Order, postings: Sequence[Posting]) -> None:
    assert len(postings) == len(order)
    posted: list[OrderedMessage] = []
    for action, posting in zip(order, postings, strict=True):
        posted += posting.before
        message = needed(action, schedule.placement)
        assert message is None or message in posted or message.source == stage
        posted += posting.before_send
        assert not posting.before_send or produced(action, schedule.placement) is not None
    for peer in range(schedule.stages):
        if peer != stage:
            assert [each for each in posted if each.source == peer] == sent_to(
                schedule.orders[peer], stage, schedule.placement
            )
    wanted = {needed(action, schedule.placement) for action in order}
    received = {message for message in wanted if message is not None and message.source != stage}
    assert len(posted) == len(received)
    assert set(posted) == received


def test_a_receive_is_posted_before_what_runs_when_its_message_is_made() -> None:
    """Stock's order on two stages, gradients late: stage 1 ends B1 during stage 0's F2, and B2 before its B2."""
    schedule = one_f_one_b(2, 3)
    late = {(1, 0): LinkCost(0.25)}
    costs = uniform_costs(2, 3, forward_s=1.5, backward_input_s=1.0, backward_weight_s=1.0, links=late)
    postings = receives_before(schedule, 0, launch_ranks(schedule, costs))
    reported = {
        f"{action.kind}{action.micro_batch}": [message.micro_batch for message in posting.before]
        for action, posting in zip(schedule.orders[0], postings, strict=True)
    }
    assert reported == {"F0": [], "F1": [], "B0": [0], "F2": [1], "B1": [], "B2": [2]}


@given(schedules_and_costs())
def test_what_all_stages_launch_is_part_of_one_order(case: tuple[Schedule, Costs | None]) -> None:
    """Stages that launch their parts one after the other, waiting for both ends of each transfer, come to an end."""
    schedule, costs = case
    ranks = launch_ranks(schedule, costs)
    for at_ends in (False, True):
        parts: list[list[OrderedMessage]] = []
        for stage, order in enumerate(schedule.orders):
            part: list[OrderedMessage] = []
            postings = receives_at_ends(schedule, stage, costs) if at_ends else receives_before(schedule, stage, ranks)
            for action, posting in zip(order, postings, strict=True):
                part += (*posting.before, *posting.before_send)
                message = produced(action, schedule.placement)
                part += [message] if message is not None and message.target != stage else []
            parts.append(part)
        places = [0] * schedule.stages
        going = True
        while going:
            going = False
            for stage, part in enumerate(parts):
                if places[stage] == len(part):
                    continue
                message = part[places[stage]]
                other = message.target if message.source == stage else message.source
                if parts[other][places[other] : places[other] + 1] == [message]:
                    places[stage] += 1
                    places[other] += 1
                    going = True
        assert places == [len(part) for part in parts]


def test_where_sizes_are_unknown_a_receive_is_posted_when_its_message_should_be_there() -> None:
    """The same order. Stage 1 runs B1 while stage 0 runs F2: its gradient is asked for after that."""
    schedule = one_f_one_b(2, 3)
    reported = {
        f"{action.kind}{action.micro_batch}": [message.micro_batch for message in posting.before]
        for action, posting in zip(schedule.orders[0], receives_at_ends(schedule, 0), strict=True)
    }
    assert reported == {"F0": [], "F1": [], "B0": [0], "F2": [], "B1": [1], "B2": [2]}
