# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_clock_service.py: messages with time stamps between "hosts" whose clocks drift, for seconds.

The drift is decorated on; a relation of the beginning alone is off by milliseconds in the end.
"""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from adaptra_megatron.common import gathering
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.control import clocks
from adaptra_megatron.control.clocks import ClockSettings, RelatedClock

OFFSETS_S = (10.0, -2000.0, 555.5)
DRIFTS = (0.0, 400e-6, -400e-6)
SECONDS, MESSAGES = 6.0, 60
CLOSE_S = 1e-3


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, real = dist.get_rank(), time.monotonic
    zero_s = real()
    decorated = SimpleNamespace(monotonic=lambda: OFFSETS_S[rank] + (1.0 + DRIFTS[rank]) * (real() - zero_s))
    clocks.time = decorated
    gathering.host_identity = lambda: f"host {rank}/network"
    job = gathering.gather_layout(range(dist.get_world_size()))
    settings = ClockSettings(bind="127.0.0.1", interval_s=0.1)
    joined = clocks.relate_clocks(ControlStore.of_job(job.token), job, 10.0, settings)
    time.sleep(SECONDS)
    one_way_s: list[float] = []
    for _message in range(MESSAGES):
        sent_s = pass_on(rank, joined)
        if sent_s is not None:
            now_s = decorated.monotonic()
            one_way_s.append(now_s + joined.offset_at(now_s) - sent_s)
        dist.barrier()
    joined.close()
    if rank > 0:
        drifted_s = SECONDS * abs(DRIFTS[rank] - DRIFTS[rank - 1])
        assert drifted_s > 2 * CLOSE_S, "a relation of the beginning alone fails below"
        # Of one message to the next, waiting for a core may take milliseconds: the quickest tells of the clocks.
        assert abs(min(one_way_s)) < CLOSE_S, one_way_s
    dist.barrier()
    dist.destroy_process_group()


def pass_on(rank: int, joined: RelatedClock) -> float | None:
    """Each rank sends its time, on the pipeline's clock, to the next; returns what has just come."""
    stamp = torch.zeros(1, dtype=torch.float64)
    sends = []
    if rank + 1 < dist.get_world_size():
        now_s = clocks.now_s()
        stamp[0] = now_s + joined.offset_at(now_s)
        sends.append(dist.isend(stamp, rank + 1))
    if rank == 0:
        received = None
    else:
        came = torch.zeros(1, dtype=torch.float64)
        dist.recv(came, rank - 1)
        received = came.item()
    for send in sends:
        send.wait()
    return received


if __name__ == "__main__":
    main()
