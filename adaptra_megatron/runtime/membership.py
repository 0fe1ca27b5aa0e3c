# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a job's planning, and how their clocks relate; settled once, when the first iteration starts."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adaptra_megatron.runtime.clocks import boot_identity, offset_to, serve_clock


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan; names this rank, what it waited for, and the remedy."""


def exchange_error(rank: int, what: str, timeout_s: float, cause: Exception) -> ExchangeError:
    """The error of `rank`, which could not do `what`."""
    return ExchangeError(
        f"rank {rank} could not {what} within {timeout_s:g} s: {cause}. "
        "Another rank died, hangs, or cannot be reached; look at the first rank whose log stops"
    )


@dataclass(frozen=True)
class Membership:
    """This rank's place in the job."""

    rank: int
    world_size: int
    pipeline: int
    """First global rank of this rank's pipeline: tells parallel pipelines apart."""
    clock_offset_s: float
    """Seconds to add to this rank's monotonic clock to get the clock of its pipeline's first stage."""
    token: str
    """Same on all ranks, new each time: keeps the keys of two exchanges apart."""


@dataclass(frozen=True)
class _Introduction:
    pipeline: int
    stage: int
    boot: str
    token: str


def join(pipeline_group: dist.ProcessGroup, timeout_s: float) -> Membership:
    """Collective over all ranks of the job, since ranks of different pipelines share collectives inside F, B and W.

    Raises ExchangeError when a rank does not come within the timeout.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipeline = dist.get_global_rank(pipeline_group, 0)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="ADAPTRA_CONTROL")
        mine = _Introduction(pipeline, pipeline_group.rank(), boot_identity(), uuid.uuid4().hex)
        introductions: list[Any] = [None] * world_size
        dist.all_gather_object(introductions, mine, group=group)
        offset_s = _relate_clocks(group, rank, introductions)
        dist.destroy_process_group(group)
    except RuntimeError as cause:
        raise exchange_error(rank, "join the other ranks for planning", timeout_s, cause) from cause
    return Membership(rank, world_size, pipeline, offset_s, introductions[0].token)


def _relate_clocks(group: dist.ProcessGroup, rank: int, introductions: list[_Introduction]) -> float:
    """Seconds to add to this rank's clock to get the clock of its pipeline's first stage."""
    mine = introductions[rank]
    ranks = {other.stage: number for number, other in enumerate(introductions) if other.pipeline == mine.pipeline}
    to_previous = 0.0
    # Pair by pair down the pipeline: each rank first asks its predecessor, then answers its successor.
    if mine.stage > 0 and introductions[ranks[mine.stage - 1]].boot != mine.boot:
        to_previous = offset_to(group, ranks[mine.stage - 1])
    if mine.stage + 1 < len(ranks) and introductions[ranks[mine.stage + 1]].boot != mine.boot:
        serve_clock(group, ranks[mine.stage + 1])
    offsets: list[Any] = [None] * len(introductions)
    dist.all_gather_object(offsets, to_previous, group=group)
    return float(sum(offsets[ranks[stage]] for stage in range(1, mine.stage + 1)))
