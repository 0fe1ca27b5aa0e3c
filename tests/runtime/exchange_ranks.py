# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_exchange.py: `exchange_ranks.py SCENARIO`, over gloo; the job is one pipeline of 3 stages."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch.distributed as dist

from adaptra_megatron.runtime import clocks, membership
from adaptra_megatron.runtime.decisions import Decision, LinkName
from adaptra_megatron.runtime.exchange import DELAY, PlanExchange, Round
from adaptra_megatron.runtime.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.runtime.membership import ExchangeError, join
from adaptra_megatron.telemetry.records import ActionRecord

SKEWS_S = (10.0, -2000.0, 555.5)
TIMEOUT_S = 3.0


def set_clock(boot: str, skew_s: float) -> None:
    """Pretend that this rank is on host `boot`, whose clock started at another time."""
    clocks.time = SimpleNamespace(monotonic=lambda: time.monotonic() + skew_s)
    membership.boot_identity = lambda: boot


def relate_clocks() -> None:
    """Offsets lead to the first stage's clock, and are not asked for where ranks share one."""
    rank = dist.get_rank()
    set_clock(f"host {rank}", SKEWS_S[rank])
    joined = join(dist.group.WORLD, TIMEOUT_S)
    assert abs(joined.clock_offset_s - (SKEWS_S[0] - SKEWS_S[rank])) < 0.2, joined.clock_offset_s
    assert joined.clock_offset_s != 0.0 or rank == 0
    # Two pipelines of one and two stages: links are timed on the pipeline's own clock, all else on the job's.
    pipelines = [dist.new_group([0]), dist.new_group([1, 2])]
    joined = join(pipelines[min(rank, 1)], TIMEOUT_S)
    assert abs(joined.clock_offset_s - (SKEWS_S[0] - SKEWS_S[rank])) < 0.2, joined.clock_offset_s
    within_s = joined.clock.offset_at(clocks.now_s())
    assert abs(within_s - (SKEWS_S[min(rank, 1)] - SKEWS_S[rank])) < 0.2, within_s
    # The first two on one host: what their clocks say then makes no difference.
    set_clock("host 0" if rank < 2 else "host 2", SKEWS_S[rank])
    joined = join(dist.group.WORLD, TIMEOUT_S)
    if rank < 2:
        assert joined.clock_offset_s == 0.0
    else:
        assert abs(joined.clock_offset_s - (SKEWS_S[1] - SKEWS_S[2])) < 0.2, joined.clock_offset_s


def measurement(iteration: int) -> StageMeasurement:
    records = [ActionRecord(iteration, dist.get_rank(), "F", 0, 0, 0.0, 0.0, float(iteration))]
    return stage_measurement(0, dist.get_rank(), 4, records, ([], []), 0.0)


def decide() -> None:
    """Measurements of all get to the leader, once per iteration, and its decisions get to all; two at a time."""
    seen: list[list[tuple[int, object]]] = []

    def plan_of(rounds: Sequence[Round]) -> Decision:
        for measurements in rounds:
            seen.append([(entry.stage, entry.durations_s["F", 0].tolist()) for entry in measurements])
        return Decision(len(seen), f"plan {len(seen)}")

    joined = join(dist.group.WORLD, TIMEOUT_S)
    first = PlanExchange(joined, plan_of, TIMEOUT_S)
    other = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(-1, None), TIMEOUT_S)
    for iteration in range(6):
        if iteration >= DELAY:
            # Everybody has handed in iteration - 2 long ago: the leader has decided on it.
            time.sleep(0.3)
            number = iteration - DELAY + 1
            assert first.early_decision(iteration) == Decision(number, f"plan {number}")
            assert first.decision(iteration) == Decision(number, f"plan {number}")
            assert other.decision(iteration) == Decision(-1, None)
        assert first.early_decision(iteration + DELAY) is None
        for exchange in (first, other):
            exchange.post(iteration, measurement(iteration))
        dist.barrier()
    if dist.get_rank() == 0:
        assert seen[:4] == [[(stage, [float(iteration)]) for stage in range(3)] for iteration in range(4)]
    else:
        assert seen == []
    dist.barrier()
    start_s = time.monotonic()
    first.close()
    other.close()
    assert time.monotonic() - start_s < 2 * TIMEOUT_S


def plan_slowly() -> None:
    """Planning takes many iterations: none waits for it, every rank runs the same, and the plan comes when it is made,
    from all that was measured meanwhile."""
    taken: list[int] = []

    def plan_of(rounds: Sequence[Round]) -> Decision:
        taken.append(len(rounds))
        time.sleep(0.5)
        return Decision(len(taken), f"plan {len(taken)}")

    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), plan_of, TIMEOUT_S)
    decisions, longest_s = [], 0.0
    for iteration in range(40):
        if iteration >= DELAY:
            start_s = time.monotonic()
            decisions.append(exchange.decision(iteration))
            longest_s = max(longest_s, time.monotonic() - start_s)
        exchange.post(iteration, measurement(iteration))
        time.sleep(0.04)
        dist.barrier()
    assert longest_s < 0.3, longest_s
    everybodys: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, decisions)
    assert everybodys == [decisions] * dist.get_world_size()
    plans = [decision for decision in decisions if decision.csv is not None]
    assert [decision.csv for decision in plans] == [f"plan {number + 1}" for number in range(len(plans))]
    assert 2 <= len(plans) <= 5, plans
    assert decisions[0] == Decision(0, None), "nothing was made in time for it"
    if dist.get_rank() == 0:
        assert max(taken) > 3
    dist.barrier()
    exchange.close()


def lag_behind() -> None:
    """Ranks are up to two iterations apart, and each still reads what the others have run."""
    rank = dist.get_rank()
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda rounds: Decision(len(rounds), None), TIMEOUT_S)
    decisions = []
    for iteration in range(8):
        if iteration >= DELAY:
            decisions.append(exchange.decision(iteration))
        exchange.post(iteration, measurement(iteration))
        if rank == 2 and iteration in (0, 3):
            time.sleep(0.6)  # the others run ahead meanwhile: nothing here holds them up
    everybodys: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, decisions)
    assert everybodys == [decisions] * dist.get_world_size()
    dist.barrier()
    exchange.close()


def measure_late() -> None:
    """An iteration that takes longer than any thread waits for the store at a time."""
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(1, None), TIMEOUT_S)
    exchange.post(0, measurement(0))
    time.sleep(1.5)
    exchange.post(1, measurement(1))
    assert exchange.decision(DELAY + 1).number == 1
    dist.barrier()
    exchange.close()


def fail_to_plan() -> None:
    """A planner that fails changes nothing: the plan it last made stays in force everywhere, with its paths."""
    calls = []
    diverted = (LinkName(0, 1, 2),)

    def plan_of(rounds: Sequence[Round]) -> Decision:
        calls.append(rounds)
        if len(calls) > 1:
            raise ZeroDivisionError("a bug of ours")
        return Decision(7, "plan", diverted=diverted)

    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), plan_of, TIMEOUT_S)
    decisions = []
    for iteration in range(5):
        if iteration >= DELAY:
            decisions.append(exchange.decision(iteration))
        exchange.post(iteration, measurement(iteration))
        dist.barrier()
        time.sleep(0.2)
    assert decisions == [Decision(7, "plan", diverted=diverted)] + [Decision(7, None, diverted=diverted)] * 2
    dist.barrier()
    exchange.close()


def lose_a_rank() -> None:
    """A rank that is not the leader dies: what runs is kept, until the training itself notices."""
    rank = dist.get_rank()
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(1, None), TIMEOUT_S)
    exchange.post(0, measurement(0))
    dist.barrier()
    time.sleep(0.5)
    assert exchange.decision(DELAY) == Decision(1, None)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for iteration in (1, 2):
        exchange.post(iteration, measurement(iteration))
        assert exchange.decision(iteration + DELAY) == Decision(1, None)
    _end("survived", 1.0 if rank == 0 else 0.0)


def lose_the_leader() -> None:
    """The leader hangs before it has said what to run: all others are told, in time."""
    rank = dist.get_rank()
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(1, None), TIMEOUT_S)
    dist.barrier()
    if rank == 0:
        _end("hung", 2 * TIMEOUT_S)  # its process still serves the store, as torchrun's agent would
    exchange.post(0, measurement(0))
    _expect_error(exchange, f"within {TIMEOUT_S:g} s")


def lose_the_store() -> None:
    """The process that serves the job's store dies: nobody can know what the others run."""
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(1, None), TIMEOUT_S)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    exchange.post(0, measurement(0))
    assert exchange.early_decision(DELAY) is None
    _expect_error(exchange, "could not learn the plan of iteration 2")


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
    time.sleep(after_s)  # rank 0 serves the store, and its links tell others that it is there
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
