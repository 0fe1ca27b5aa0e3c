# SPDX-License-Identifier: Apache-2.0
"""Times between two ranks of one machine, measured some times over."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ROUNDS = 8
"""The quickest counts: in the others the machine may have had something else to do, for a second at a time."""


def together(source: int) -> float:
    """When `source` begins, in seconds of the clock that both ranks have; the other gets it at once."""
    dist.barrier()
    started_s = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(started_s, source)
    return started_s.item()
