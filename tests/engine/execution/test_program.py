# SPDX-License-Identifier: Apache-2.0
"""What a stage's order is compiled into, and which receives are posted when."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.engine.execution.inbox import Addresses
from adaptra_megatron.engine.execution.stage_program import Program, compile_program
from adaptra_megatron.schedule.classic import gpipe
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Kind, Schedule
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage, launch_ranks, start_ranks
from adaptra_megatron.transport.message_keys import Direction, MessageKey

schedules = st.one_of(named_schedules(), random_schedules())


def programs(schedule: Schedule) -> list[Program]:
    return [compile_program(schedule, stage) for stage in range(schedule.stages)]


@given(schedules, st.booleans())
def test_receives_are_what_the_neighbours_send_in_their_orders(schedule: Schedule, sizes_known: bool) -> None:
    compiled = programs(schedule)
    for stage in range(schedule.stages):
        program = compile_program(schedule, stage, sizes_known=sizes_known)
        assert [step.action for step in program.steps] == list(schedule.orders[stage])
        assert list(program.receives.values()) == list(range(len(program.receives)))
        for peer in range(schedule.stages):
            sent = [step.send for step in compiled[peer].steps if step.send is not None]
            received = [message for message in program.receives if message.source == peer]
            assert received == [message for message in sent if message.target == stage and peer != stage]
        needed = {step.receive for step in program.steps if step.receive and step.receive.source != stage}
        assert needed == set(program.receives)


@given(schedules)
def test_a_chunk_is_complete_with_its_last_gradient_and_not_before(schedule: Schedule) -> None:
    for program in programs(schedule):
        complete = [index for index, step in enumerate(program.steps) if step.completes_chunk]
        assert [program.steps[index].action.chunk for index in complete] == sorted(
            range(schedule.chunks), key=lambda chunk: _last_gradient(program, chunk)
        )
        assert complete == sorted(_last_gradient(program, chunk) for chunk in range(schedule.chunks))


@given(schedules, st.booleans())
def test_reductions_of_replicas_with_plans_of_their_own_come_in_the_order_of_a_backward(
    schedule: Schedule, sizes_known: bool
) -> None:
    """By chunk and by stage, from the last; so orders of replicas can be joined to one."""
    ranks = launch_ranks(schedule) if sizes_known else start_ranks(schedule)
    compiled = [compile_program(schedule, stage, sizes_known=sizes_known) for stage in range(schedule.stages)]
    places = []
    for chunk in reversed(range(schedule.chunks)):
        for program in reversed(compiled):
            if (place := program.reductions.get(chunk)) is None:
                places.append(math.inf)
                continue
            assert place > _last_gradient(program, chunk)
            places.append(ranks[program.stage][place])
    ends = itertools.takewhile(math.isfinite, places)
    assert places == [*sorted(set(ends)), *[math.inf] * places.count(math.inf)]


def _last_gradient(program: Program, chunk: int) -> int:
    """No forward and no input gradient of the chunk completes weight gradients."""
    gradients = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return max(
        index
        for index, step in enumerate(program.steps)
        if step.action.chunk == chunk and step.action.kind in gradients
    )


@given(schedules, st.booleans())
def test_receives_come_before_what_needs_them_and_not_before_what_they_are_made_after(
    schedule: Schedule, sizes_known: bool
) -> None:
    ranks = launch_ranks(schedule)
    made = {
        step.send: ranks[stage][step.position]
        for stage, program in enumerate(programs(schedule))
        for step in program.steps
        if step.send is not None
    }
    for stage in range(schedule.stages):
        program = compile_program(schedule, stage, sizes_known=sizes_known)
        for step in program.steps:
            if step.receive is not None and step.receive.source != stage:
                assert program.receives[step.receive] < step.receives_before
            posted = [message for message, place in program.receives.items() if place < step.receives_before]
            assert all(made[message] < ranks[stage][step.position] for message in posted)
            if sizes_known:
                assert len(posted) == sum(
                    rank < ranks[stage][step.position]
                    for message, rank in made.items()
                    if message.target == stage != message.source
                )
                assert step.receives_before_send == step.receives_before


def test_what_a_plan_was_made_for_says_when_receives_are_posted() -> None:
    """Over a slow link stage 0 begins all its forwards before stage 1 begins its first."""
    schedule = gpipe(2, 3)
    slow = uniform_costs(
        2, 3, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, links={(0, 1): LinkCost(latency_s=5.0)}
    )
    for costs, before in ((None, [2, 3, 3, 3, 3, 3]), (slow, [3, 3, 3, 3, 3, 3])):
        assert [step.receives_before for step in compile_program(schedule, 1, costs).steps] == before


def test_keys_tell_activations_and_gradients_of_all_chunks_and_iterations_apart() -> None:
    assert Addresses((0, 1), 7).key(OrderedMessage(0, 1, False, 2, 5)) == MessageKey(7, Direction.ACTIVATION, 2, 5)
    assert Addresses((0, 1), 7).key(OrderedMessage(1, 0, True, 2, 5)) == MessageKey(7, Direction.GRADIENT, 2, 5)
