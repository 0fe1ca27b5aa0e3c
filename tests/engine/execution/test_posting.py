# SPDX-License-Identifier: Apache-2.0
"""Receives posted by launch order deadlock on no device; those posted otherwise do, and the model shows it.

Everything is recorded from the real executor, or from Megatron's own schedules, and played on the model of the device.
`scripts/play_postings.py` plays many more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_model import Device, Outcome, Rank, play
from support.device_model.calls import Communicator, Compute, DeviceWait, Program, Transfers
from support.device_model.cases import Case, enough_blocks, random_case, with_device_waits
from support.device_model.from_megatron import record_stock
from support.device_model.from_runtime import Iteration, Job, RecordingTransport
from support.device_model.other_rules import JustInTime, LookAhead
from support.device_model.threads import OneAtATimeTransport, SessionTransport, Threads, makers

from adaptra_megatron.engine.execution.inbox import Inbox
from adaptra_megatron.schedule.classic import interleaved_combined, one_f_one_b, split_backward, stock_order
from adaptra_megatron.schedule.costs import Costs, uniform_costs_for
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule

ONE_QUEUE, MANY_QUEUES = Device(queues=1), Device(queues=10_000)
NOT_CONNECTED = dataclasses.replace(MANY_QUEUES, connected=False)
SERIAL = Device(queues=1, serial=True)


def costs_of(schedule: Schedule) -> Costs:
    return uniform_costs_for(schedule)


def whole(*orders: str) -> Schedule:
    """A schedule of whole backwards: "F0 F1 B0 B1" for each stage."""
    parsed = tuple(
        tuple(Action(stage, Kind(word[0]), 0, int(word[1:])) for word in order.split())
        for stage, order in enumerate(orders)
    )
    schedule = Schedule(stages=len(orders), chunks=1, micro_batches=len(parsed[0]) // 2, orders=parsed)
    check_schedule(schedule)
    return schedule


def recorded(schedule: Schedule, rule: Callable[..., Inbox] = Inbox) -> list[Program]:
    job = Job(iterations=(Iteration(schedule=schedule, costs=costs_of(schedule)),), inbox=rule)
    return [job.record(stage) for stage in range(schedule.stages)]


def play_stages(programs: list[Program], device: Device, seed: int = 0) -> Outcome:
    return play({Rank(0, stage): {"training": program} for stage, program in enumerate(programs)}, device, seed)


def waiting(programs: list[Program], waits: str) -> list[Program]:
    return [with_device_waits(program, waits, Random(0)) for program in programs]


SMALLEST = one_f_one_b(2, 1)
TWICE = one_f_one_b(2, 2)
ALL_AHEAD = whole("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 B1 F2 F3 B2 B3")
"""The smallest order of two stages that sends posted just in time cannot run on one queue."""


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("device", [ONE_QUEUE, MANY_QUEUES, NOT_CONNECTED, SERIAL])
def test_combined_actions_receive_before_both_and_send_behind_both(stages: int, device: Device) -> None:
    for chunks in (2, 3):
        schedule = interleaved_combined(stages, 2 * stages, chunks)
        for waits in ("none", "at every call"):
            outcome = play_stages(waiting(recorded(schedule), waits), device)
            assert outcome.deadlock is None


class TestOtherRules:
    """Each is the smallest order for which the rule fails in that way: fewer stages or micro-batches do not."""

    @pytest.mark.parametrize(
        ("rule", "schedule", "device", "waits"),
        [
            (LookAhead, SMALLEST, NOT_CONNECTED, "none"),
            (LookAhead, TWICE, ONE_QUEUE, "none"),
            (LookAhead, SMALLEST, MANY_QUEUES, "at every call"),
            (JustInTime, ALL_AHEAD, ONE_QUEUE, "none"),
            (JustInTime, TWICE, MANY_QUEUES, "at every call"),
        ],
        ids=[
            "first use",
            "one queue",
            "device-wide waits",
            "just in time, one queue",
            "just in time, device-wide waits",
        ],
    )
    def test_it_deadlocks_where_the_launch_order_does_not(
        self, rule: Callable[..., Inbox], schedule: Schedule, device: Device, waits: str
    ) -> None:
        outcome = play_stages(waiting(recorded(schedule, rule), waits), device)
        assert outcome.deadlock is not None
        for each in (device, SERIAL, dataclasses.replace(SERIAL, connected=False)):
            outcome = play_stages(waiting(recorded(schedule), waits), each)
            assert outcome.deadlock is None

    def test_one_wait_is_enough_for_receives_that_are_posted_ahead(self) -> None:
        """Stage 0 has asked for a gradient before it launches the forward that this is made from."""
        programs = recorded(SMALLEST, LookAhead)
        first = next(index for index, call in enumerate(programs[0]) if isinstance(call, Compute))
        programs[0].insert(first, DeviceWait())
        outcome = play_stages(programs, MANY_QUEUES)
        assert outcome.deadlock is not None
        assert "[replica 0 stage 0: training] waits for its device" in outcome.deadlock

    def test_on_random_cases_they_often_do_while_ours_and_stock_never_do(self) -> None:
        cases = [random_case(seed) for seed in range(15)]
        deadlocks = {
            rule: sum(case.play(rule).deadlock is not None for case in cases) for rule in (Inbox, LookAhead, JustInTime)
        }
        assert deadlocks[Inbox] == 0
        assert deadlocks[LookAhead] > 10
        assert deadlocks[JustInTime] > 7
        assert not any(case.play_stock().deadlock for case in cases)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_posted_by_launch_order_nothing_deadlocks(seed: int) -> None:
    outcome = random_case(seed).play()
    assert outcome.deadlock is None, outcome.deadlock


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_nor_does_it_where_hosts_wait_for_their_devices_at_every_call_of_the_first_iteration(seed: int) -> None:
    """Stock's order with whole backwards, on a device that is not connected, as the runtime begins."""
    random = Random(seed)
    stages, chunks = random.randint(2, 8), random.randint(1, 3)
    schedule = stock_order(stages, stages * random.randint(1, 3), chunks)
    programs = waiting(recorded(schedule), "at every call")
    for device in (SERIAL, ONE_QUEUE, MANY_QUEUES):
        for connected in (True, False):
            assert play_stages(programs, dataclasses.replace(device, connected=connected)).deadlock is None


class TestRoom:
    """What a stage has streams of NCCL for must fit on its device at once, and one block of computation."""

    CASES = tuple(
        dataclasses.replace(case, device=dataclasses.replace(case.device, queues=32, serial=False))
        for case in (random_case(seed) for seed in range(12))
    )

    def deadlocks(self, blocks: int) -> int:
        def limited(case: Case) -> Case:
            few = dataclasses.replace(case.device, blocks=blocks, blocks_per_transfer=2, blocks_per_collective=2)
            return dataclasses.replace(case, device=few)

        return sum(limited(case).play().deadlock is not None for case in self.CASES)

    def test_enough_is_enough_and_much_less_is_not(self) -> None:
        assert self.deadlocks(enough_blocks(2, 2)) == 0
        assert self.deadlocks(3) > 0


class TestSizesThatVary:
    def test_a_receive_before_the_send_next_to_it_is_what_keeps_two_stages_apart(self) -> None:
        """Without it, both wait at once: each for its send, before it posts the receive that the other waits for."""
        schedule = split_backward(one_f_one_b(3, 4), 0)
        job = Job(iterations=(Iteration(schedule=schedule, costs=costs_of(schedule)),), sizes_vary=True)

        class NotBeforeSends(Inbox):
            def post_before_send(self, step: Any) -> None:
                """Post nothing: receives wait until they are needed."""

        for rule, deadlocks in ((Inbox, False), (NotBeforeSends, True)):
            ruled = dataclasses.replace(job, inbox=rule)
            programs = waiting([ruled.record(stage) for stage in range(3)], "at every call")
            assert (play_stages(programs, MANY_QUEUES).deadlock is not None) is deadlocks

    def test_a_header_costs_little_of_what_it_costs_stock(self) -> None:
        schedule = one_f_one_b(4, 12)
        costs = costs_of(schedule)
        job = Job(iterations=(Iteration(schedule=schedule, costs=costs),))
        varying = dataclasses.replace(job, sizes_vary=True)
        fixed_s, varying_s = (
            play_stages([each.record(stage) for stage in range(4)], MANY_QUEUES).makespan_s for each in (job, varying)
        )
        stock_s = play_stages([record_stock(stage, costs, varying=True) for stage in range(4)], MANY_QUEUES).makespan_s
        assert fixed_s <= varying_s <= min(1.01 * fixed_s, stock_s + 0.1)


class TestSecondThreads:
    """What threads other than the training's may do, for links that have device sessions."""

    CASES = tuple(random_case(seed) for seed in range(12))

    def threads(self, case: Case, stage: int, transport: type[RecordingTransport]) -> Threads:
        made: list[RecordingTransport] = []

        def make(*arguments: Any, **how: Any) -> RecordingTransport:
            made.append(transport(*arguments, **how))
            return made[0]

        job = dataclasses.replace(case.job, iterations=case.job.iterations[:1], replicas=1, sizes_vary=False)
        with mock.patch("support.device_model.from_runtime.RecordingTransport", make):
            program = job.record(stage)
        return {"training": program, **getattr(made[0], "threads", {})}

    def deadlocks(self, transport: type[RecordingTransport]) -> int:
        count = 0
        for case in self.CASES:
            ranks = {Rank(0, stage): self.threads(case, stage, transport) for stage in range(case.stages)}
            for threads in ranks.values():
                threads["training"] = with_device_waits(threads["training"], "some", Random(case.seed))
            count += play(ranks, MANY_QUEUES, case.seed).deadlock is not None
        return count

    def test_receives_that_a_thread_begins_one_by_one_deadlock_and_those_of_the_training_thread_do_not(self) -> None:
        assert self.deadlocks(OneAtATimeTransport) > 0
        assert self.deadlocks(SessionTransport) == 0

    def test_a_thread_may_make_and_abort_communicators_but_not_try_them(self) -> None:
        """A message that no training thread has launched keeps a device from what its host waits for."""
        for greets in (False, True):
            count = 0
            for case in self.CASES:
                others = makers(0, case.stages, Random(case.seed), greets=greets)
                ranks = {
                    Rank(0, stage): {
                        "training": with_device_waits(
                            dataclasses.replace(case.job, replicas=1).record(stage), "some", Random(case.seed)
                        ),
                        **others[stage],
                    }
                    for stage in range(case.stages)
                }
                count += play(ranks, MANY_QUEUES, case.seed).deadlock is not None
            assert (count > 0) is greets


def test_cases_are_what_they_are_meant_to_be() -> None:
    """Sizes, evaluations, plans, replicas that reduce within backwards and several iterations, all of them."""
    cases = [random_case(seed) for seed in range(150)]
    iterations = [iteration for case in cases for iteration in case.job.iterations]
    schedules = [iteration.schedule for iteration in iterations]
    assert {schedule.stages for schedule in schedules} == set(range(2, 9))
    assert {schedule.chunks for schedule in schedules} == {1, 2, 3}
    assert max(schedule.micro_batches for schedule in schedules) == 32
    assert sum(not iteration.training for iteration in iterations) > 20
    assert sum(iteration.planned_for is not None for iteration in iterations) > 60
    assert any(len(case.job.iterations) == 3 for case in cases)
    assert {case.waits for case in cases} == {"none", "some", "at every call"}
    assert any(reduces_within_backwards(case) for case in cases)


def reduces_within_backwards(case: Case) -> bool:
    """Return whether the first stage launches a reduction between two transfers."""
    calls = case.job.record(0)
    kinds = ["reduction" if getattr(call, "communicator", Communicator("")).of_stage else "" for call in calls]
    transfers = [index for index, call in enumerate(calls) if isinstance(call, Transfers)]
    return "reduction" in kinds[: transfers[-1]]
