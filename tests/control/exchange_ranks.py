# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_control_loop.py: `exchange_ranks.py SCENARIO`, over gloo; the job is a pipeline of 3 stages."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather_layout
from adaptra_megatron.common.layout import Introduction, JobLayout, layout_of
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control import clocks
from adaptra_megatron.control.clocks import RelatedClock
from adaptra_megatron.control.decisions import DELAY, Decision, LinkName, MadeDecision, Order, Paths
from adaptra_megatron.control.exchange import ExchangeError, PlanExchange, exchange_place
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.control.sidecar.planner_connections import Address, Gathering, ReportServer, Round, round_of
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

SKEWS_S = (10.0, -2000.0, 555.5)
TIMEOUT_S = 5.0
PLANNED_OVER, PAUSE_S = 8, 0.125


def join(pipelines: Sequence[Sequence[int]], boots: Sequence[str]) -> RelatedClock:
    """This rank's clock in a job of these pipelines. `boots`: the host of each rank, whose clock started at another
    time."""
    rank = dist.get_rank()
    clocks.time = SimpleNamespace(monotonic=lambda: time.monotonic() + SKEWS_S[rank])
    token = gather_layout([0, 1, 2]).token
    introductions = [
        Introduction(member, ranks[0], stage, [], "", boots[member], token)
        for ranks in pipelines
        for stage, member in enumerate(ranks)
    ]
    return clocks.relate_clocks(ControlStore.of_job(token), layout_of(introductions, rank), TIMEOUT_S)


def relate_clocks() -> None:
    """Offsets lead to the first stage's clock, and are not asked for where ranks share one."""
    rank = dist.get_rank()
    clock = join([[0, 1, 2]], "abc")
    assert abs(clock.first_offset_s - (SKEWS_S[0] - SKEWS_S[rank])) < 2.0, clock.first_offset_s
    assert clock.first_offset_s != 0.0 or rank == 0
    # Two pipelines of one and two stages: links are timed on the pipeline's own clock, all else on the job's.
    clock = join([[0], [1, 2]], "abc")
    assert abs(clock.first_offset_s - (SKEWS_S[0] - SKEWS_S[rank])) < 2.0, clock.first_offset_s
    within_s = clock.offset_at(clocks.now_s())
    assert abs(within_s - (SKEWS_S[min(rank, 1)] - SKEWS_S[rank])) < 2.0, within_s
    # The first two on one host: what their clocks say then makes no difference.
    clock = join([[0, 1, 2]], "aac")
    expected_s = 0.0 if rank < 2 else SKEWS_S[0] - SKEWS_S[2]
    assert abs(clock.first_offset_s - expected_s) < 2.0, clock.first_offset_s
    assert clock.first_offset_s != 0.0 or rank < 2
    # Three pipelines, two of them on one host: one asks for both.
    clock = join([[0], [1], [2]], "abb")
    expected_s = 0.0 if rank == 0 else SKEWS_S[0] - SKEWS_S[1]
    assert abs(clock.first_offset_s - expected_s) < 2.0, clock.first_offset_s


class InProcess:
    """A planner without a process of its own, in a thread of this one."""

    def __init__(self, decide: Callable[[Sequence[Round]], Decision], control: ControlStore, layout: JobLayout) -> None:
        self._plan, self._rank = decide, layout.rank
        self._gathering, self._news = Gathering(layout.reporters), threading.Condition()
        self._loop = asyncio.new_event_loop()
        place = control.seal(exchange_place(layout)).place
        self._server = ReportServer(control.secret, place, layout.reporters, self._add)
        listener, (host, port) = listen_tcp("127.0.0.1")
        self.address = Address(str(host), int(port))
        self._loop.call_soon(self._server.listen, listener)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _add(self, rank: int, iteration: int, report: bytes) -> None:
        with self._news:
            if self._gathering.add(rank, iteration, report):
                self._news.notify_all()

    def decide(self, own: Sequence[tuple[int, bytes]]) -> MadeDecision:
        with self._news:
            for iteration, report in own:
                self._gathering.expect(iteration)
                self._gathering.add(self._rank, iteration, report)
            self._news.wait_for(lambda: self._gathering.over)
            over = self._gathering.take()
        decision = self._plan([round_of(reported) for reported in over])
        return MadeDecision(over[-1].iteration, decision, encoded(decision))

    def spread(self, iteration: int, packet: bytes) -> None:
        self._loop.call_soon_threadsafe(self._server.send_all, iteration, packet)

    def interject(self, work: Callable[[], object]) -> bool:
        return False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def exchange_of(decide: Callable[[Sequence[Round]], Decision], **options: bool) -> PlanExchange:
    """This rank's, in a job that is one pipeline."""
    job: JobLayout = gather_layout([0, 1, 2])
    control = ControlStore.of_job(job.token)
    planner = InProcess(decide, control, job) if job.rank == job.leader else None
    return PlanExchange(control, job, planner, TIMEOUT_S, **options)


COSTS = uniform_costs(1, 100, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def plan(number: int) -> Order:
    return Order(((number,),), COSTS)


def measurement(iteration: int) -> StageMeasurement:
    records = [ActionRecord(iteration, dist.get_rank(), "F", 0, 0, 0.0, 0.0, float(iteration))]
    return stage_measurement(0, dist.get_rank(), 4, records, ([], []), 0.0)


def decide() -> None:
    """Measurements of all get to the leader, once per iteration, and its decisions get to all; two at a time."""
    seen: list[list[tuple[int, object]]] = []

    def plan_of(rounds: Sequence[Round]) -> Decision:
        for measurements in rounds:
            seen.append([(entry.stage, entry.durations_s["F", 0].tolist()) for entry in measurements])
        return Decision(len(seen), plan(len(seen)))

    first, other = exchange_of(plan_of), exchange_of(lambda _: Decision(-1))
    for iteration in range(6):
        if iteration >= DELAY:
            number = iteration - DELAY + 1
            assert first.early_decision(iteration) == Decision(number, plan(number))
            assert first.decision(iteration) == Decision(number, plan(number))
            assert other.decision(iteration) == Decision(-1)
        assert first.early_decision(iteration + DELAY) is None
        for exchange in (first, other):
            exchange.post(iteration, measurement(iteration))
        # Before the next is posted: a late leader would decide on both at once.
        for exchange in (first, other):
            until_decided(exchange, iteration + DELAY)
    if dist.get_rank() == 0:
        assert seen[:4] == [[(stage, [float(iteration)]) for stage in range(3)] for iteration in range(4)]
    else:
        assert seen == []
    dist.barrier()
    start_s = time.monotonic()
    first.close()
    other.close()
    assert time.monotonic() - start_s < 2 * TIMEOUT_S


def until_decided(exchange: PlanExchange, iteration: int) -> None:
    until(lambda: exchange.early_decision(iteration) is not None, f"nothing was decided for iteration {iteration}")


def plan_slowly() -> None:
    """Planning takes many iterations: none waits for it, every rank runs the same, and the plan comes when it is made,
    from all that was measured meanwhile."""
    taken, made = list[int](), list[int]()
    begun, ended = [-1], threading.Event()

    def plan_of(rounds: Sequence[Round]) -> Decision:
        taken.append(len(rounds))
        goal = begun[0] + PLANNED_OVER
        until(lambda: begun[0] >= goal or ended.is_set(), "an iteration waits for the plan", 60.0)
        made.append(len(rounds))
        return Decision(len(taken), plan(len(taken)))

    exchange = exchange_of(plan_of)
    decisions, waits_s = [], []
    for iteration in range(5 * PLANNED_OVER):
        begun[0], begun_s = iteration, time.monotonic()
        if iteration >= DELAY:
            decisions.append(exchange.decision(iteration))
            waits_s.append(time.monotonic() - begun_s)
        exchange.post(iteration, measurement(iteration))
        time.sleep(PAUSE_S)
        dist.barrier()
    ended.set()
    assert statistics.median(waits_s) < PAUSE_S, waits_s
    assert max(waits_s) < 0.75, waits_s
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, decisions)
    assert gathered == [decisions] * dist.get_world_size()
    plans = [decision for decision in decisions if decision.order is not None]
    assert [decision.order for decision in plans] == [plan(number + 1) for number in range(len(plans))]
    assert 2 <= len(plans) <= 5, plans
    assert decisions[0] == Decision(0), "nothing was made in time for it"
    if dist.get_rank() == 0:
        assert max(taken) > 3
    dist.barrier()
    exchange.close()
    until(lambda: made == taken, "an iteration has waited for a plan")


def lag_behind() -> None:
    """Ranks are up to two iterations apart, and each still reads what the others have run."""
    rank = dist.get_rank()
    exchange = exchange_of(lambda rounds: Decision(len(rounds)))
    decisions = []
    for iteration in range(8):
        if iteration >= DELAY:
            decisions.append(exchange.decision(iteration))
        exchange.post(iteration, measurement(iteration))
        if rank == 2 and iteration in (0, 3):
            time.sleep(0.6)  # the others run ahead meanwhile: nothing here holds them up
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, decisions)
    assert gathered == [decisions] * dist.get_world_size()
    dist.barrier()
    exchange.close()


def measure_late() -> None:
    """An iteration that takes longer than any thread waits for the store at a time."""
    exchange = exchange_of(lambda _: Decision(1))
    exchange.post(0, measurement(0))
    time.sleep(1.5)
    exchange.post(1, measurement(1))
    until_decided(exchange, DELAY + 1)
    assert exchange.decision(DELAY + 1).number == 1
    dist.barrier()
    exchange.close()


def fail_to_plan() -> None:
    """A planner that fails changes nothing: the plan it last made stays in force everywhere, with its paths."""
    calls = []
    paths = Paths((LinkName(0, 1, 2),))

    def plan_of(rounds: Sequence[Round]) -> Decision:
        calls.append(rounds)
        if len(calls) > 1:
            raise ZeroDivisionError("a bug of ours")
        return Decision(7, plan(7), paths=paths)

    exchange = exchange_of(plan_of)
    decisions = []
    for iteration in range(5):
        if iteration >= DELAY:
            decisions.append(exchange.decision(iteration))
        exchange.post(iteration, measurement(iteration))
        until_decided(exchange, iteration + DELAY)
    assert decisions == [Decision(7, plan(7), paths=paths)] + [Decision(7, paths=paths)] * 2
    dist.barrier()
    exchange.close()


def lose_a_rank() -> None:
    """A rank that is not the leader dies: what runs is kept, until the training itself notices."""
    rank = dist.get_rank()
    exchange = exchange_of(lambda _: Decision(1))
    exchange.post(0, measurement(0))
    dist.barrier()
    until_decided(exchange, DELAY)
    assert exchange.decision(DELAY) == Decision(1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for iteration in (1, 2):
        exchange.post(iteration, measurement(iteration))
        assert exchange.decision(iteration + DELAY) == Decision(1)
    _end("survived", 1.0 if rank == 0 else 0.0)


def lose_the_leader() -> None:
    """The leader hangs before it has said what to run: all others end with an error, in time."""
    rank = dist.get_rank()
    exchange = exchange_of(lambda _: Decision(1))
    dist.barrier()
    if rank == 0:
        _end("hung", 2 * TIMEOUT_S)
    exchange.post(0, measurement(0))
    _expect_error(exchange, f"within {TIMEOUT_S:g} s")


def lose_the_store() -> None:
    """The process that serves the job's store dies: no rank can know what the others run."""
    _expect_error(_without_store(), "could not learn the plan of iteration 2")


def lose_the_store_with_a_fixed_order() -> None:
    """The same, where all ranks know what they run: training goes on, and the log says once what is lost."""
    exchange = _without_store(fixed_order=True)
    for iteration in range(DELAY, DELAY + 3):
        assert exchange.decision(iteration) == Decision(0)
        exchange.post(iteration - 1, measurement(iteration - 1))
    _end("survived", 0.0)


def _without_store(**options: bool) -> PlanExchange:
    exchange = exchange_of(lambda _: Decision(1), **options)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    exchange.post(0, measurement(0))
    assert exchange.early_decision(DELAY) is None
    return exchange


def _expect_error(exchange: PlanExchange, part: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(ExchangeError) as failed:
        exchange.decision(DELAY)
    assert time.monotonic() - start_s < 2 * TIMEOUT_S
    for text in (f"rank {dist.get_rank()} could not", "look at the first rank whose log stops", part):
        assert text in str(failed.value), failed.value
    _end("survived", 0.0)


def _end(word: str, after_s: float) -> NoReturn:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    time.sleep(after_s)  # the links of rank 0 tell others that it is there
    os._exit(0)


SCENARIOS = {
    function.__name__: function
    for function in (
        relate_clocks,
        decide,
        plan_slowly,
        lag_behind,
        measure_late,
        fail_to_plan,
        lose_a_rank,
        lose_the_leader,
        lose_the_store,
        lose_the_store_with_a_fixed_order,
    )
}


def main(scenarios: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for scenario in scenarios:
        SCENARIOS[scenario]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
