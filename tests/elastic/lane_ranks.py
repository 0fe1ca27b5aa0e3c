# SPDX-License-Identifier: Apache-2.0
"""Four ranks of two replicas, a cell of two lanes each: rank 0 fails outside of calls, and the others see it last.

Rank 1, of the same cell, cannot take part in the job any more; it has ended before ranks 2 and 3 look who lives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Membership, MembershipRecords
from adaptra_megatron.elastic.generation import Generation
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.elastic.recovery import RecoveryManager

TIMEOUT_S = 20.0


def look_last(manager: RecoveryManager, records: MembershipRecords) -> None:
    """Have this rank look who lives once ranks 0 and 1 have left."""
    original = manager._detector.change

    def last(tried: frozenset[int]) -> Membership | None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (newest := records.newest()) is None or not {0, 1}.isdisjoint(newest.live):
            assert time.monotonic() < deadline_s, newest
            time.sleep(0.02)
        return original(tried)

    manager._detector.change = last  # type: ignore[method-assign]


def main() -> None:
    """Carry out two calls, each followed by an operation outside, in which rank 0 fails."""
    groups = FaultTolerantGroups()
    groups.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    lanes: list[Any] = [dist.new_group([lane, 2 + lane], group_desc="data") for lane in range(2)]
    workers = {each: Worker(Cell(each // 2, 0), each % 2, "host", "boot/net") for each in range(4)}
    layout = JobLayout(rank, workers, "job", together=True)
    records = MembershipRecords.of_rank(TIMEOUT_S)
    manager = RecoveryManager(layout, ControlStore.of_job("job"), groups, records, TIMEOUT_S, 10.0)
    if rank >= 2:
        look_last(manager, MembershipRecords.of_rank(TIMEOUT_S))

    def attempt(generation: Generation, number: int) -> None:
        dist.all_reduce(torch.zeros(1), group=lanes[rank % 2])

    try:
        for call in range(2):
            manager.carry_out(attempt)
            if (rank, call) == (0, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.zeros(1))
        sys.stdout.write("has come to the end\n")
    finally:
        manager.close()


if __name__ == "__main__":
    main()
