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

import pytest
import torch.distributed as dist

from adaptra_megatron.runtime import clocks, membership
from adaptra_megatron.runtime.exchange import DELAY, Decision, PlanExchange
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
    """Measurements of all get to the leader, once per iteration, and its decision gets to all; two at a time."""
    seen: list[list[tuple[int, object]]] = []

    def plan_of(measurements: Sequence[StageMeasurement]) -> Decision:
        seen.append([(entry.stage, entry.durations_s["F", 0].tolist()) for entry in measurements])
        return Decision(len(seen), f"plan {len(seen)}" if len(seen) % 2 else None)

    joined = join(dist.group.WORLD, TIMEOUT_S)
    first = PlanExchange(joined, plan_of, TIMEOUT_S)
    other = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(-1, None), TIMEOUT_S)
    for iteration in range(6):
        if iteration >= DELAY:
            number = iteration - DELAY + 1
            assert first.decision(iteration) == Decision(number, f"plan {number}" if number % 2 else None)
            assert other.decision(iteration) == Decision(-1, None)
        for exchange in (first, other):
            exchange.post(iteration, measurement(iteration))
    if dist.get_rank() == 0:
        assert seen[:4] == [[(stage, [float(iteration)]) for stage in range(3)] for iteration in range(4)]
    else:
        assert seen == []
    dist.barrier()
    start_s = time.monotonic()
    first.close()
    other.close()
    assert time.monotonic() - start_s < 2 * TIMEOUT_S


def fail_to_plan() -> None:
    """A planner that fails changes nothing: the plan it last made stays in force everywhere."""
    calls = []

    def plan_of(measurements: Sequence[StageMeasurement]) -> Decision:
        calls.append(measurements)
        if len(calls) > 1:
            raise ZeroDivisionError("a bug of ours")
        return Decision(7, "plan")

    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), plan_of, TIMEOUT_S)
    for iteration in range(3):
        exchange.post(iteration, measurement(iteration))
    decisions = [exchange.decision(iteration) for iteration in range(DELAY, DELAY + 3)]
    assert decisions == [Decision(7, "plan"), Decision(7, None), Decision(7, None)]
    dist.barrier()
    exchange.close()


def lose_a_rank() -> None:
    """A rank dies between two decisions: all others are told, in time."""
    rank = dist.get_rank()
    exchange = PlanExchange(join(dist.group.WORLD, TIMEOUT_S), lambda _: Decision(1, None), TIMEOUT_S)
    exchange.post(0, measurement(0))
    assert exchange.decision(DELAY) == Decision(1, None)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.post(1, measurement(1))
    start_s = time.monotonic()
    with pytest.raises(ExchangeError) as failed:
        exchange.decision(1 + DELAY)
    assert time.monotonic() - start_s < 2 * TIMEOUT_S
    for part in (f"rank {rank} could not", f"within {TIMEOUT_S:g} s", "look at the first rank whose log stops"):
        assert part in str(failed.value), failed.value
    sys.stdout.write("survived\n")
    sys.stdout.flush()
    time.sleep(1.0 if rank == 0 else 0.0)  # rank 0 serves the store, and its links tell others that it is there
    os._exit(0)


SCENARIOS = {function.__name__: function for function in (relate_clocks, decide, fail_to_plan, lose_a_rank)}


def main(scenarios: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for scenario in scenarios:
        SCENARIOS[scenario]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
