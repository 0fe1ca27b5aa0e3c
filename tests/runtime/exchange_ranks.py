# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_exchange.py: `exchange_ranks.py SCENARIO`, over gloo; the job is one pipeline of three stages.

Each rank pretends to be a host of its own, whose clock started at another time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from adaptra_megatron.runtime import clocks, exchange
from adaptra_megatron.runtime.exchange import ExchangeError, PlanExchange
from adaptra_megatron.runtime.measurements import StageMeasurement

SKEWS_S = (10.0, -2000.0, 555.5)
TIMEOUT_S = 3.0


def set_clock(boot: str, skew_s: float) -> None:
    clocks.time = SimpleNamespace(monotonic=lambda: time.monotonic() + skew_s)
    exchange.boot_identity = lambda: boot


def relate_clocks() -> None:
    """Offsets lead to the first stage's clock, and are not asked for where ranks share one."""
    rank = dist.get_rank()
    set_clock(f"host {rank}", SKEWS_S[rank])
    joined = PlanExchange(dist.group.WORLD, TIMEOUT_S)
    assert abs(joined.clock_offset_s - (SKEWS_S[0] - SKEWS_S[rank])) < 0.2, joined.clock_offset_s
    assert joined.clock_offset_s != 0.0 or rank == 0
    joined.close()
    # The first two on one host: what their clocks say then makes no difference.
    set_clock("host 0" if rank < 2 else "host 2", SKEWS_S[rank])
    joined = PlanExchange(dist.group.WORLD, TIMEOUT_S)
    if rank < 2:
        assert joined.clock_offset_s == 0.0
    else:
        assert abs(joined.clock_offset_s - (SKEWS_S[1] - SKEWS_S[2])) < 0.2, joined.clock_offset_s
    joined.close()


def decide() -> None:
    """Measurements get to the leader, its decision gets to all."""
    rank = dist.get_rank()
    joined = PlanExchange(dist.group.WORLD, TIMEOUT_S)
    for number in range(3):
        mine = StageMeasurement(0, rank, {"F": (float(number),)}, (), ())
        gathered = joined.gather(mine)
        if joined.leads:
            assert [(entry.stage, entry.compute_s["F"]) for entry in gathered] == [(i, (number,)) for i in range(3)]
        else:
            assert gathered == []
        decision = (number, f"plan {number}" if number else None)
        assert joined.announce(decision if joined.leads else (-1, "a follower's")) == decision
    assert [joined.leads, joined.pipeline] == [rank == 0, 0]
    joined.close()


def lose_a_rank() -> None:
    """A rank dies between two decisions: all others are told, in time."""
    rank = dist.get_rank()
    joined = PlanExchange(dist.group.WORLD, TIMEOUT_S)
    joined.announce((1, None))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(ExchangeError) as failed:
        _go_on(joined)
    assert time.monotonic() - start_s < 2 * TIMEOUT_S
    for part in (f"rank {rank} could not", f"within {TIMEOUT_S:g} s", "look at the first rank whose log stops"):
        assert part in str(failed.value), failed.value
    sys.stdout.write("survived\n")
    sys.stdout.flush()
    time.sleep(1.0 if rank == 0 else 0.0)  # rank 0 serves the store, and its links tell others that it is there
    os._exit(0)


def _go_on(joined: PlanExchange) -> None:
    """Some iterations more: what a follower hands in may leave before it is known that nobody reads it."""
    for number in range(100):
        joined.gather(StageMeasurement(0, dist.get_rank(), {}, (), ()))
        joined.announce((number, None))


def main(scenarios: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for scenario in scenarios:
        {function.__name__: function for function in (relate_clocks, decide, lose_a_rank)}[scenario]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
