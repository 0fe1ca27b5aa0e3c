# SPDX-License-Identifier: Apache-2.0
"""Brings measurements of all ranks to one of them, and its decision back to all, between two iterations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adaptra_megatron.runtime.clocks import boot_identity, offset_to, serve_clock
from adaptra_megatron.runtime.measurements import StageMeasurement


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan; names this rank, what it waited for, and the remedy."""


@dataclass(frozen=True)
class _Member:
    pipeline: int
    stage: int
    boot: str


class PlanExchange:
    """Collective over all ranks of the job, since ranks of different pipelines share collectives inside F, B and W.

    Every method is called by every rank at the same point. When a rank is dead or silent they raise ExchangeError
    after the timeout.
    """

    LEADER = 0

    def __init__(self, pipeline_group: dist.ProcessGroup, timeout_s: float) -> None:
        """Makes a CPU process group over the whole job and relates the clocks of its hosts."""
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self.pipeline = dist.get_global_rank(pipeline_group, 0)
        try:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="ADAPTRA_CONTROL"
            )
            member = _Member(self.pipeline, pipeline_group.rank(), boot_identity())
            members: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(members, member, group=self._group)
            self.clock_offset_s = self._relate_clocks(pipeline_group, members)
        except RuntimeError as cause:
            raise self._error("set up the control group", cause) from cause

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._rank == self.LEADER

    def gather(self, measurement: StageMeasurement) -> list[StageMeasurement]:
        """All ranks' measurements on the leader, an empty list elsewhere."""
        gathered: list[Any] | None = [None] * dist.get_world_size() if self.leads else None
        try:
            dist.gather_object(measurement, gathered, dst=self.LEADER, group=self._group)
        except RuntimeError as cause:
            raise self._error("hand in measurements", cause) from cause
        return gathered or []

    def announce(self, decision: tuple[int, str | None]) -> tuple[int, str | None]:
        """The leader's (plan number, schedule as CSV or None to keep the current one), on every rank."""
        box = [decision]
        try:
            dist.broadcast_object_list(box, src=self.LEADER, group=self._group)
        except RuntimeError as cause:
            raise self._error("learn the next plan", cause) from cause
        return box[0]

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _relate_clocks(self, pipeline_group: dist.ProcessGroup, members: list[_Member]) -> float:
        """Seconds to add to this rank's clock to get the clock of its pipeline's first stage."""
        mine = members[self._rank]
        ranks = {member.stage: rank for rank, member in enumerate(members) if member.pipeline == mine.pipeline}
        to_previous = 0.0
        # Pair by pair down the pipeline: each rank first asks its predecessor, then answers its successor.
        if mine.stage > 0 and members[ranks[mine.stage - 1]].boot != mine.boot:
            to_previous = offset_to(self._group, ranks[mine.stage - 1])
        if mine.stage + 1 < len(ranks) and members[ranks[mine.stage + 1]].boot != mine.boot:
            serve_clock(self._group, ranks[mine.stage + 1])
        offsets: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(offsets, to_previous, group=self._group)
        return float(sum(offsets[ranks[stage]] for stage in range(1, mine.stage + 1)))

    def _error(self, what: str, cause: Exception) -> ExchangeError:
        return ExchangeError(
            f"rank {self._rank} could not {what} within {self._timeout_s:g} s: {cause}. "
            "Another rank died, hangs, or cannot be reached; look at the first rank whose log stops"
        )
