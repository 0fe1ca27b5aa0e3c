# SPDX-License-Identifier: Apache-2.0
"""What a stage's order is compiled into, and which receives are posted when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import classic_schedules, random_schedules

from adaptra_megatron.runtime.program import Program, ReceiveWindow, compile_program, message_key
from adaptra_megatron.schedule.actions import Kind, Schedule
from adaptra_megatron.schedule.routing import Message
from adaptra_megatron.transport.messages import Direction, MessageKey

schedules = st.one_of(classic_schedules(), random_schedules())


def programs(schedule: Schedule) -> list[Program]:
    return [compile_program(schedule, stage) for stage in range(schedule.stages)]


@given(schedules)
def test_expected_is_what_the_neighbour_sends_in_its_order(schedule: Schedule) -> None:
    compiled = programs(schedule)
    for program in compiled:
        assert [step.action for step in program.steps] == list(schedule.orders[program.stage])
        for peer, expected in program.expected.items():
            sent = [step.send for step in compiled[peer].steps]
            assert list(expected) == [message for message in sent if message and message.target == program.stage]
        received = Counter(
            step.receive for step in program.steps if step.receive and step.receive.source != step.action.stage
        )
        assert received == Counter(message for expected in program.expected.values() for message in expected)


@given(schedules)
def test_a_chunk_is_complete_with_its_last_gradient_and_not_before(schedule: Schedule) -> None:
    for program in programs(schedule):
        complete = [index for index, step in enumerate(program.steps) if step.completes_chunk]
        assert [program.steps[index].action.chunk for index in complete] == sorted(
            range(schedule.chunks), key=lambda chunk: _last_gradient(program, chunk)
        )
        assert complete == sorted(_last_gradient(program, chunk) for chunk in range(schedule.chunks))


def _last_gradient(program: Program, chunk: int) -> int:
    """No forward and no input gradient of the chunk completes weight gradients."""
    gradients = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return max(
        index
        for index, step in enumerate(program.steps)
        if step.action.chunk == chunk and step.action.kind in gradients
    )


@given(schedules, st.integers(1, 6))
def test_receives_are_posted_once_in_the_senders_order_and_in_time(schedule: Schedule, lookahead: int) -> None:
    """As the executor drives it: at the start, before each wait, and after each message consumed."""
    for program in programs(schedule):
        windows = {peer: ReceiveWindow(expected, lookahead) for peer, expected in program.expected.items()}
        posted: dict[int, list[Message]] = {peer: list(window.open_until(None)) for peer, window in windows.items()}
        consumed: Counter[int] = Counter()
        for step in program.steps:
            message = step.receive
            if message is None or message.source == program.stage:
                continue
            peer = message.source
            posted[peer] += windows[peer].open_until(message)
            assert message in posted[peer], "would be waited for without a receive"
            assert tuple(posted[peer]) == program.expected[peer][: len(posted[peer])]
            windows[peer].consume()
            consumed[peer] += 1
            posted[peer] += windows[peer].open_until(None)
            ahead = len(posted[peer]) - consumed[peer]
            left = len(program.expected[peer]) - consumed[peer]
            assert ahead >= min(lookahead, left), "fewer are posted ahead than asked for"
        assert {peer: tuple(messages) for peer, messages in posted.items()} == program.expected


def test_in_order_no_more_than_the_lookahead_is_posted() -> None:
    messages = [Message(0, 1, False, 0, number) for number in range(6)]
    window = ReceiveWindow(messages, lookahead=2)
    assert window.open_until(None) == messages[:2]
    assert window.open_until(messages[0]) == []
    window.consume()
    assert window.open_until(None) == messages[2:3]
    assert window.open_until(messages[4]) == messages[3:5]
    assert window.open_until(None) == []


def test_keys_tell_activations_and_gradients_of_all_chunks_and_iterations_apart() -> None:
    assert message_key(Message(0, 1, False, 2, 5), 7) == MessageKey(7, Direction.ACTIVATION, 2, 5)
    assert message_key(Message(1, 0, True, 2, 5), 7) == MessageKey(7, Direction.GRADIENT, 2, 5)
