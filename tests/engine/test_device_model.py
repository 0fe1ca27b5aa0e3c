# SPDX-License-Identifier: Apache-2.0
"""The model of the device that posting rules are judged by does what its sources say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_model import Device, Outcome, Rank, play
from support.device_model.calls import (
    Abort,
    AwaitSignal,
    Call,
    Collective,
    Communicator,
    Compute,
    DeviceWait,
    HostWait,
    Pause,
    Record,
    Signal,
    StreamWait,
    Transfer,
    Transfers,
)
from support.device_model.from_megatron import record_stock
from support.device_model.from_runtime import Iteration, Job
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.schedule.classic import forward_only, stock_order
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs, uniform_costs_for
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate

ONE, MANY = Device(queues=1), Device(queues=10_000)
LINK, BACK = Communicator("0>1"), Communicator("1>0")


def run(device: Device, *programs: Sequence[Call], seed: int = 0, **threads: Sequence[Call]) -> Outcome:
    """One program per stage; `threads`: more of stage 0."""
    ranks = {Rank(0, stage): {"training": list(program)} for stage, program in enumerate(programs)}
    ranks[Rank(0, 0)].update({name: list(program) for name, program in threads.items()})
    return play(ranks, device, seed)


def send(number: int = 0, *, stream: str = "to 1", seconds: float = 1.0, after: tuple[int, ...] = ()) -> Transfers:
    return Transfers(stream, LINK, (Transfer(0, 1, number, seconds),), after)


def receive(number: int = 0, *, stream: str = "from 0", seconds: float = 1.0, after: tuple[int, ...] = ()) -> Transfers:
    return Transfers(stream, LINK, (Transfer(0, 1, number, seconds),), after)


def ends(outcome: Outcome, stage: int = 0) -> dict[object, float]:
    return {label: end_s for (rank, label), (_, end_s) in outcome.times_s.items() if rank.stage == stage}


class TestQueues:
    A_WAITS = (Compute("a", 2.0, "a"), Compute("b", 1.0, "b", after=(0,)), Compute("c", 1.0, "c"))

    def test_a_stream_is_in_order(self) -> None:
        outcome = run(MANY, [Compute("a", 1.0, "first"), Compute("a", 2.0, "second")])
        assert ends(outcome) == {"first": 1.0, "second": 3.0}

    def test_of_many_queues_each_goes_on_by_itself(self) -> None:
        assert ends(run(MANY, self.A_WAITS)) == {"a": 2.0, "b": 3.0, "c": 1.0}

    def test_in_one_queue_what_waits_holds_up_what_is_behind_it_but_what_runs_does_not(self) -> None:
        assert ends(run(ONE, self.A_WAITS)) == {"a": 2.0, "b": 3.0, "c": 3.0}

    def test_some_of_a_few_queues_are_shared(self) -> None:
        found = {ends(run(Device(queues=2), self.A_WAITS, seed=seed))["c"] for seed in range(20)}
        assert found == {1.0, 3.0}

    def test_a_serial_device_runs_one_thing_at_a_time(self) -> None:
        outcome = run(Device(queues=1, serial=True), [Compute("a", 2.0, "a"), Compute("b", 1.0, "b")])
        assert ends(outcome) == {"a": 2.0, "b": 3.0}

    @pytest.mark.parametrize("queues", [1, 10_000])
    @pytest.mark.parametrize(
        ("timed", "how", "holds"),
        [
            (False, {"timed_records": True}, False),
            (True, {}, False),
            (True, {"timed_records": True}, True),
            (False, {"trailing_waits": True}, True),
        ],
    )
    def test_what_waits_behind_a_transfer_holds_up_a_queue_where_it_is_said_to(
        self, timed: bool, how: dict[str, bool], holds: bool, queues: int
    ) -> None:
        program = [receive(), Record("from 0", timed), Compute("a", 1.0, "a"), Compute("a", 1.0, "b", after=(1,))]
        outcome = run(Device(queues=queues, **how), [Pause(3.0), send()], program)  # type: ignore[arg-type]
        assert ends(outcome, 1)["a"] == (5.0 if holds and queues == 1 else 1.0)
        assert ends(outcome, 1)["b"] == (6.0 if holds and queues == 1 else 5.0)

    @pytest.mark.parametrize(("trailing", "stands"), [(False, False), (True, True)])
    def test_probes_of_both_directions_stand_in_serial_queues(self, trailing: bool, stands: bool) -> None:
        """So where the host path is preferred for that reason, no device path is held ready by them."""
        send_back = Transfers("to 0", BACK, (Transfer(1, 0, "gradient"),))
        ranks: list[list[Call]] = [[send(), receive_back()], [send_back, receive()]]
        outcome = run(Device(queues=1, trailing_waits=trailing), *ranks)
        assert (outcome.deadlock is not None) is stands

    def test_a_full_queue_keeps_the_host(self) -> None:
        reported = {}
        for launches in (None, 3):
            program = [*[Compute("a", 1.0) for _ in range(6)], Signal("launched"), HostWait((5,))]
            device = Device(queues=1, serial=True, launches=launches)
            outcome = run(device, program, [AwaitSignal("launched"), Compute("a", 0.0, "launched")])
            reported[launches] = ends(outcome, 1)["launched"]
        assert reported == {None: 0.0, 3: 2.0}

    def test_a_standstill_by_a_full_queue_is_told(self) -> None:
        program = [receive_back(), Compute("a", 1.0, "a", after=(0,)), Compute("a", 1.0, "b")]
        outcome = run(Device(queues=1, launches=1), program, [AwaitSignal("never")])
        assert outcome.deadlock is not None
        assert "[replica 0 stage 0: training] finds its queue full behind [replica 0 stage 0: a]" in outcome.deadlock

    def test_a_wait_of_a_stream_holds_it_up(self) -> None:
        outcome = run(MANY, [Compute("a", 2.0, "a"), StreamWait("b", (0,)), Compute("b", 1.0, "b")])
        assert ends(outcome)["b"] == 3.0


class TestTransfers:
    def test_both_ends_last_from_the_start_of_the_later_one(self) -> None:
        sender = [send(), Compute("after", 1.0, "sent", after=(0,))]
        receiver = [
            Compute("before", 3.0, "before"),
            receive(after=(0,)),
            Compute("after", 1.0, "received", after=(1,)),
        ]
        outcome = run(MANY, sender, receiver)
        assert ends(outcome, 0) == {"sent": 5.0}
        assert ends(outcome, 1)["received"] == 5.0

    def test_two_that_send_first_on_one_stream_wait_for_ever_and_a_group_does_not(self) -> None:
        def both(stream: str, grouped: bool, *transfers: Transfer) -> list[Call]:
            if grouped:
                return [Transfers(stream, LINK, transfers)]
            return [Transfers(stream, LINK, (transfer,)) for transfer in transfers]

        there, back = Transfer(0, 1, "there"), Transfer(1, 0, "back")
        for grouped in (True, False):
            outcome = run(MANY, both("pair", grouped, there, back), both("pair", grouped, back, there))
            assert (outcome.deadlock is None) is grouped

    def test_they_match_in_the_order_of_the_calls(self) -> None:
        with pytest.raises(AssertionError, match="messages crossed"):
            run(MANY, [send(1), send(2)], [receive(2), receive(1)])

    def test_a_collective_begins_when_all_members_have(self) -> None:
        def program(seconds: float) -> list[Call]:
            all_ranks = Communicator("all")
            return [Compute("a", seconds), Collective("a", all_ranks, 3, 1.0, "all")]

        outcome = run(ONE, program(1.0), program(2.0), program(4.0))
        assert [ends(outcome, stage)["all"] for stage in range(3)] == [5.0] * 3

    def test_replicas_of_a_stage_share_communicators_and_pipelines_do_not(self) -> None:
        gradients = [Collective("a", Communicator("gradients", of_stage=True), 2, 1.0, "all")]
        ranks = {Rank(replica, stage): {"training": gradients} for replica in range(2) for stage in range(2)}
        assert play(ranks, ONE).deadlock is None
        alone = [Collective("a", Communicator("embedding"), 2, 1.0)]
        assert play({rank: {"training": alone} for rank in ranks if rank.stage == 0}, ONE).deadlock is not None


class TestHosts:
    def test_a_host_waits_for_events_and_for_its_device(self) -> None:
        work = [Compute("a", 1.0), Compute("b", 3.0)]
        assert ends(run(MANY, [*work, HostWait((0,)), Compute("c", 1.0, "c")]))["c"] == 2.0
        assert ends(run(MANY, [*work, DeviceWait(), Compute("c", 1.0, "c")]))["c"] == 4.0

    def test_a_wait_for_the_device_keeps_other_threads_from_launching(self) -> None:
        for locks, end_s in ((True, 4.0), (False, 2.0)):
            waiting = [Compute("a", 3.0), DeviceWait(locks)]
            assert ends(run(MANY, waiting, other=[Pause(1.0), Compute("b", 1.0, "b")]))["b"] == end_s

    def test_what_is_reported_is_heard_when_it_has_happened(self) -> None:
        sender = [Compute("a", 2.0), Signal("it", (0,), seconds=1.0), Compute("b", 1.0, "b")]
        outcome = run(MANY, sender, [AwaitSignal("it"), Compute("a", 1.0, "received")])
        assert ends(outcome, 0)["b"] == 1.0
        assert ends(outcome, 1)["received"] == 4.0

    def test_a_communicator_that_is_not_connected_keeps_both_hosts(self) -> None:
        late = [Pause(2.0), receive(), Compute("a", 1.0, "a")]
        for connected, end_s in ((True, 1.0), (False, 3.0)):
            outcome = run(Device(connected=connected), [send(), Compute("a", 1.0, "a")], late)
            assert ends(outcome, 0)["a"] == end_s
        again = [send(0), send(1), Compute("a", 1.0, "a")]
        outcome = run(Device(queues=10_000, connected=False), again, [receive(0), Pause(5.0), receive(1)])
        assert ends(outcome, 0)["a"] == 1.0, "it connects once"

    def test_an_abort_ends_its_own_end_alone(self) -> None:
        given_up = [send(), send(1), Compute("a", 1.0, "a", after=(1,))]
        outcome = run(MANY, given_up, [Compute("a", 1.0)], other=[Pause(2.0), Abort(LINK)])
        assert ends(outcome) == {"a": 3.0}
        outcome = run(MANY, given_up, [receive(), receive(1)], other=[Abort(LINK)])
        assert outcome.deadlock is not None
        assert "aborted at its other end" in outcome.deadlock

    @pytest.mark.parametrize("device", [ONE, MANY])
    @pytest.mark.parametrize("order", [(LINK, BACK), (BACK, LINK)])
    def test_communicators_of_a_pair_are_to_be_aborted_by_a_thread_each(
        self, order: tuple[Communicator, Communicator], device: Device
    ) -> None:
        """Each abort frees memory, which waits for the device, and there the other's kernels stand (pytorch#150690)."""
        program = [send(), receive_back(), Compute("a", 1.0, "a", after=(0, 1))]
        one_by_one = [Pause(2.0), Abort(order[0]), DeviceWait(), Abort(order[1]), DeviceWait()]
        by_themselves = {each.name: [Pause(2.0), Abort(each), DeviceWait()] for each in order}
        assert not ends(run(device, program, [AwaitSignal("never")], one=one_by_one))
        assert ends(run(device, program, [AwaitSignal("never")], **by_themselves)) == {"a": 3.0}


class TestLaunchOrder:
    def test_kernels_of_nccl_start_or_end_in_the_order_of_the_calls(self) -> None:
        first, second = send(after=(0,)), Transfers("to 2", Communicator("0>2"), (Transfer(0, 2, 0, 1.0),))
        program = [Compute("a", 2.0), first, second, Compute("b", 1.0, "b", after=(2,))]
        for order, end_s in ((None, 2.0), ("started", 4.0), ("ended", 7.0)):
            outcome = run(
                Device(queues=10_000, launch_order=order),
                program,
                [Pause(4.0), receive()],
                [Transfers("from 0", Communicator("0>2"), (Transfer(0, 2, 0, 1.0),))],
            )
            assert ends(outcome)["b"] == end_s

    def test_threads_that_could_race_are_named(self) -> None:
        peer = [receive(), Transfers("from 0", Communicator("2"), (Transfer(0, 1, 1, 1.0),))]
        other = [Transfers("to 1 too", Communicator("2"), (Transfer(0, 1, 1, 1.0),))]
        for order, racing in ((None, ()), ("started", (Rank(0, 0),))):
            outcome = run(Device(launch_order=order), [send()], peer, other=other)
            assert outcome.deadlock is None
            assert outcome.racing == racing


class TestRoom:
    def test_a_kernel_of_nccl_waits_for_room_and_holds_up_its_queue(self) -> None:
        links = {peer: Communicator(f"0>{peer}") for peer in (1, 2, 3)}
        sends = [Transfers(f"to {peer}", link, (Transfer(0, peer, 0, 1.0),)) for peer, link in links.items()]
        program = [*sends, Compute("a", 1.0, "behind"), Compute("b", 0.0, "third", after=(2,))]
        late = [
            [Pause(pause_s), Transfers("a", links[peer], (Transfer(0, peer, 0, 1.0),))]
            for peer, pause_s in ((1, 1.0), (2, 2.0), (3, 0.0))
        ]
        for blocks, expected in ((7, {"behind": 1.0, "third": 1.0}), (4, {"behind": 4.0, "third": 3.0})):
            outcome = run(Device(queues=1, blocks=blocks, blocks_per_transfer=2), program, *late)
            assert outcome.deadlock is None
            assert ends(outcome) == expected

    def test_computation_needs_room_to_begin_and_to_end(self) -> None:
        program = [Compute("a", 1.0, "a"), send(), Compute("a", 1.0, "b")]
        for blocks, last_s in ((2, 2.0), (1, 5.0)):
            outcome = run(Device(queues=10_000, blocks=blocks), program, [Pause(3.0), receive()])
            assert outcome.deadlock is None
            assert ends(outcome)["b"] == last_s

    def test_spinning_kernels_can_leave_no_room_for_what_they_wait_for(self) -> None:
        waits_first = [Transfers("from 1", BACK, (Transfer(1, 0, 0),)), Compute("a", 1.0), send(after=(1,))]
        answers = [receive(), Transfers("to 0", BACK, (Transfer(1, 0, 0),), after=(0,))]
        assert run(Device(queues=10_000, blocks=2), waits_first, answers).deadlock is None
        deadlock = run(Device(queues=10_000, blocks=1), waits_first, answers).deadlock
        assert deadlock is not None
        assert "has no room next to" in deadlock


def test_a_deadlock_says_who_waits_for_whom() -> None:
    first = [receive_back(), DeviceWait(), send()]
    outcome = run(ONE, first, [receive(), Transfers("to 0", BACK, (Transfer(1, 0, "gradient"),), after=(0,))])
    assert outcome.deadlock == "\n".join(
        [
            "[replica 0 stage 0: training] waits for its device, for example for "
            "[replica 0 stage 0: receive of gradient 1>0]",
            "[replica 0 stage 0: receive of gradient 1>0] is on its device; its other end, "
            "[replica 0 stage 1: send of gradient 1>0]",
            "[replica 0 stage 1: send of gradient 1>0] comes after [replica 0 stage 1: receive of 0 0>1]",
            "[replica 0 stage 1: receive of 0 0>1] is on its device; its other end waits for "
            "[replica 0 stage 0: training]",
        ]
    )


def receive_back() -> Transfers:
    return Transfers("from 1", BACK, (Transfer(1, 0, "gradient"),))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("slow_s", [0.0, 3.0])
def test_marks_on_computations_own_stream_hold_up_nothing_in_one_queue(chunks: int, slow_s: float) -> None:
    """What is behind them in the queue waits for the same computation without them. On links' streams they would."""
    ring = {(a, b % 4) for a in range(4) for b in (a + 1, a - 1)}
    links = {ends: LinkCost(0.0, 0.05, rendezvous=True) for ends in ring}
    links[1, 2] = links[1, 2]._replace(latency_s=slow_s)
    each = dict.fromkeys(("forward_s", "backward_input_s", "backward_weight_s"), 1.0)
    costs = uniform_costs(4, 8, chunks=chunks, links=links, shared_queue=True, **each)
    run_once = Iteration(schedule=plan(costs).schedule, costs=costs, planned_for=costs)
    device, took_s = Device(queues=1, timed_records=True), {}
    for marks in (False, True):
        job = Job(iterations=(run_once,), marks=marks)
        outcome = play({Rank(0, stage): {"training": job.record(stage)} for stage in range(4)}, device)
        assert outcome.deadlock is None
        took_s[marks] = outcome.makespan_s
    assert took_s[True] == pytest.approx(took_s[False])


def test_the_same_seed_gives_the_same_run() -> None:
    device = Device(queues=2, noise=0.5)
    work = [Compute(stream, 1.0, stream) for stream in "abcdef"]
    assert run(device, work, seed=1) == run(device, work, seed=1) != run(device, work, seed=2)
    assert all(0.5 <= end_s <= 1.5 for end_s in ends(run(Device(queues=10_000, noise=0.5), work)).values())


@settings(max_examples=25)
@given(st.one_of(named_schedules(least_stages=2), random_schedules()))
def test_without_links_that_take_time_actions_run_when_the_simulator_says(schedule: Schedule) -> None:
    nothing = ((0.0,) * schedule.chunks,) * schedule.chunks
    costs = replace(
        uniform_costs_for(schedule, backward_input_s=2.0, backward_weight_s=0.5),
        combined_saving=(nothing,) * schedule.stages,
    )
    job = Job(iterations=(Iteration(schedule=schedule, costs=costs, planned_for=costs),))
    ranks = {Rank(0, stage): {"training": job.record(stage)} for stage in range(schedule.stages)}
    outcome, simulation = play(ranks, MANY), simulate(schedule, costs)
    assert outcome.deadlock is None
    for stage, order in enumerate(schedule.orders):
        played = [outcome.times_s[Rank(0, stage), (0, action)] for action in schedule.separated().orders[stage]]
        started = [0, *(place for place in range(1, len(order)) if not order[place - 1].combined)]
        assert [played[place][0] for place in started] == pytest.approx(
            [simulation.start_s[stage][place] for place in started]
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 1), (4, 6, 1), (4, 8, 2)])
def test_stocks_calls_take_what_its_blocking_schedules_take(
    stages: int, micro_batches: int, chunks: int, training: bool
) -> None:
    """Recorded from Megatron-core itself. A slow link is not quite the same: there the two ends of a call end alike."""
    costs = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links={(0, 1): LinkCost(latency_s=0.5)},
    )
    programs = [record_stock(stage, costs, training=training) for stage in range(stages)]
    schedule = stock_order if training else forward_only
    for program, order in zip(programs, schedule(stages, micro_batches, chunks).orders, strict=True):
        assert [call.label for call in program if isinstance(call, Compute)] == [(0, action) for action in order]
    outcome = run(ONE, *programs)
    assert outcome.deadlock is None
    if training and (stages > 2 or chunks == 1):
        blocking_s = simulate(schedule(stages, micro_batches, chunks), costs, blocking=True).makespan_s
        assert blocking_s <= outcome.makespan_s <= 1.04 * blocking_s
