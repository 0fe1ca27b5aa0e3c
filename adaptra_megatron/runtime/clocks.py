# SPDX-License-Identifier: Apache-2.0
"""Relates the monotonic clocks of the hosts of one pipeline when a job begins, so that one-way times make sense.

How they stay related while it runs: clock_service.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ROUNDS = 8


def now_s() -> float:
    """What is related: this rank's monotonic clock."""
    return time.monotonic()


def serve_clock(group: dist.ProcessGroup, peer: int) -> None:
    """Answer `offset_to` of `peer` (global rank). Raises RuntimeError when the group's timeout expires."""
    for _ in range(ROUNDS):
        dist.recv(torch.zeros(1, dtype=torch.float64), src=peer, group=group)
        dist.send(torch.tensor([now_s()], dtype=torch.float64), dst=peer, group=group)


def offset_to(group: dist.ProcessGroup, peer: int) -> float:
    """Seconds to add to this rank's monotonic clock to get `peer`'s; the error is below half the best round trip.

    `peer` (global rank) must run `serve_clock` at the same time. Raises RuntimeError when the group's timeout expires.
    """
    best_round_trip, best_offset = float("inf"), 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        start = now_s()
        dist.send(torch.zeros(1, dtype=torch.float64), dst=peer, group=group)
        dist.recv(answer, src=peer, group=group)
        end = now_s()
        if end - start < best_round_trip:
            best_round_trip, best_offset = end - start, answer.item() - (start + end) / 2
    return best_offset
