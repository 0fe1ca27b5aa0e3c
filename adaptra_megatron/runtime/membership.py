# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a job's planning, settled once, when the first iteration starts; and how their clocks relate."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from adaptra_megatron.runtime.clock_fit import MAX_DRIFT, ClockLine
from adaptra_megatron.runtime.clock_service import INTERVAL_S, Address, ClockFollower, ClockServer, RelatedClock
from adaptra_megatron.runtime.clocks import now_s, offset_to, serve_clock
from adaptra_megatron.runtime.gathering import gather
from adaptra_megatron.transport.messages import TransportError
from adaptra_megatron.transport.placement import boot_identity, job_secret, listen_tcp, listening_host

logger = logging.getLogger("adaptra_megatron.runtime")


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan; names this rank, what it waited for, and the remedy."""


def exchange_error(rank: int, what: str, timeout_s: float, cause: Exception) -> ExchangeError:
    """The error of `rank`, which could not do `what`."""
    return ExchangeError(
        f"rank {rank} could not {what} within {timeout_s:g} s (--adaptra-timeout-s): {cause}. "
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
    """Seconds to add to this rank's monotonic clock to get the job's, which is rank 0's as a rule, when it joined."""
    token: str
    """Same on all ranks, new each time: keeps the keys of two exchanges apart."""
    clock: RelatedClock = field(default_factory=lambda: RelatedClock(0.0), compare=False)
    """What to add at any time to get the clock of its pipeline's first stage; to be closed when the job ends."""


@dataclass(frozen=True)
class ClockSettings:
    """How clocks of different hosts stay related."""

    interface: str | None = None
    """Network interface to answer on; None: as torch.distributed's, or that of the way to the master."""
    bind: str | None = None
    """Address to answer on whatever the interfaces are."""
    interval_s: float = INTERVAL_S


@dataclass(frozen=True)
class _Introduction:
    pipeline: int
    stage: int
    boot: str
    token: str


class _Relation(NamedTuple):
    """Seconds from this rank's clock to its predecessor's, and from its pipeline's to the job's; where it answers."""

    to_previous_s: float
    to_job_s: float
    address: Address | None


def join(pipeline_group: dist.ProcessGroup, timeout_s: float, clocks: ClockSettings | None = None) -> Membership:
    """Collective over all ranks of the job, since ranks of different pipelines share collectives inside F, B and W.

    Raises ExchangeError when a rank does not come within the timeout.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipeline = dist.get_global_rank(pipeline_group, 0)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="ADAPTRA_CONTROL")
        mine = _Introduction(pipeline, pipeline_group.rank(), boot_identity(), uuid.uuid4().hex)
        introductions = gather(mine, group)
        to_job_s, clock = _relate_clocks(group, rank, introductions, clocks or ClockSettings())
        dist.destroy_process_group(group)
    except RuntimeError as cause:
        raise exchange_error(rank, "join the other ranks for planning", timeout_s, cause) from cause
    return Membership(rank, world_size, pipeline, to_job_s, introductions[0].token, clock)


def _relate_clocks(
    group: dist.ProcessGroup, rank: int, introductions: list[_Introduction], settings: ClockSettings
) -> tuple[float, RelatedClock]:
    """Seconds to add to this rank's clock to get the job's, and the clock as related to its pipeline's.

    The job's clock is that of the first of all first stages. What happens on a link is compared on the pipeline's.
    """
    mine = introductions[rank]
    ranks = {other.stage: number for number, other in enumerate(introductions) if other.pipeline == mine.pipeline}
    to_previous = 0.0
    # Pair by pair down the pipeline: each rank first asks its predecessor, then answers its successor.
    if mine.stage > 0 and introductions[ranks[mine.stage - 1]].boot != mine.boot:
        to_previous = offset_to(group, ranks[mine.stage - 1])
    if mine.stage + 1 < len(ranks) and introductions[ranks[mine.stage + 1]].boot != mine.boot:
        serve_clock(group, ranks[mine.stage + 1])
    to_job_s = _relate_pipelines(group, rank, introductions)
    strangers = any(introductions[other].boot != introductions[ranks[0]].boot for other in ranks.values())
    server, address = _serve(settings) if mine.stage == 0 and strangers else (None, None)
    told = gather(_Relation(to_previous, to_job_s, address), group)
    offset_s = sum((told[ranks[stage]].to_previous_s for stage in range(1, mine.stage + 1)), 0.0)
    _, to_job_s, address = told[ranks[0]]
    if address is None or introductions[ranks[0]].boot == mine.boot:
        return offset_s + to_job_s, RelatedClock(offset_s, to_job_s, server=server)
    follower = ClockFollower(
        address,
        job_secret(_get_default_store()),
        ClockLine(now_s(), offset_s, 0.0, float("inf"), MAX_DRIFT),
        name=f"rank {rank}",
        clock=now_s,
        interval_s=settings.interval_s,
    )
    return offset_s + to_job_s, RelatedClock(offset_s, to_job_s, follower=follower)


def _relate_pipelines(group: dist.ProcessGroup, rank: int, introductions: list[_Introduction]) -> float:
    """On a first stage: seconds to add to its clock to get that of the first of all first stages; 0 elsewhere."""
    reference, *others = sorted({other.pipeline for other in introductions})
    for first in others:
        if introductions[first].boot == introductions[reference].boot:
            continue
        if rank == first:
            return offset_to(group, reference)
        if rank == reference:
            serve_clock(group, first)
    return 0.0


def _serve(settings: ClockSettings) -> tuple[ClockServer | None, Address | None]:
    """This rank's clock, for those on other hosts; nothing where they could not reach it."""
    try:
        host = settings.bind or listening_host(settings.interface, one_host=False)
        listener, (address, port) = listen_tcp(host)
    except TransportError as cause:
        logger.warning("adaptra: clocks of hosts are related once, and drift from then on: %s", cause)
        return None, None
    return ClockServer(listener, job_secret(_get_default_store()), now_s), (str(address), int(port))
