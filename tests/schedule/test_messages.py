# SPDX-License-Identifier: Apache-2.0
"""Every message that is needed is produced, once, by the stage it is expected from; and no other is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import combined_schedules, named_schedules, random_schedules

from adaptra_megatron.schedule.ir import Action, Kind, Schedule, interleaved
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage, needed, produced, sent_to

schedules = st.one_of(named_schedules(), random_schedules(), combined_schedules(placed=True))


@given(schedules)
def test_needed_and_produced_are_inverse_over_whole_schedules(schedule: Schedule) -> None:
    placement = schedule.placement
    actions = [action for order in schedule.orders for action in order]
    made = Counter(message for action in actions if (message := produced(action, placement)) is not None)
    used = Counter(message for action in actions if (message := needed(action, placement)) is not None)
    assert made == used
    # Both directions cross each of the boundaries between virtual stages once per micro-batch.
    assert sum(made.values()) == 2 * (schedule.virtual_stages - 1) * schedule.micro_batches
    assert all(count == 1 for count in made.values())
    assert all(message.target == message.source or message[:2] in placement.links for message in made)


@given(schedules)
def test_a_message_joins_neighbours_of_the_model(schedule: Schedule) -> None:
    placement = schedule.placement
    for action in (action for order in schedule.orders for action in order):
        message = produced(action, placement)
        position = placement.places.index((action.stage, action.chunk))
        if action.kind is Kind.FORWARD:
            following: int | None = position + 1
        elif action.kind is Kind.BACKWARD_WEIGHT:
            following = None
        else:
            following = position - 1
        if following is None or not 0 <= following < schedule.virtual_stages:
            assert message is None
        else:
            stage, chunk = placement.places[following]
            gradient = action.kind is not Kind.FORWARD
            assert message == OrderedMessage(action.stage, stage, gradient, chunk, action.micro_batch)


@given(schedules)
def test_sent_to_keeps_the_senders_order(schedule: Schedule) -> None:
    placement = schedule.placement
    for order in schedule.orders:
        sent = {target: sent_to(order, target, placement) for target in range(schedule.stages)}
        for action in order:
            message = produced(action, placement)
            if message is not None:
                assert sent[message.target].pop(0) == message
        assert not any(sent.values())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(3, Kind.FORWARD, 0, 5), OrderedMessage(3, 0, False, 1, 5)),
        (Action(0, Kind.BACKWARD_INPUT, 1, 5), OrderedMessage(0, 3, True, 0, 5)),
        (Action(3, Kind.FORWARD, 1, 5), None),
        (Action(0, Kind.BACKWARD, 0, 5), None),
        (Action(2, Kind.BACKWARD_WEIGHT, 1, 5), None),
    ],
)
def test_produced_at_the_seams_of_four_stages_of_two_chunks(action: Action, message: OrderedMessage | None) -> None:
    assert produced(action, interleaved(4, 2)) == message
