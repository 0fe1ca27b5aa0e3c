# SPDX-License-Identifier: Apache-2.0
"""Ranks that share collectives inside F, B and W run them in one order: one of them decides, the others follow.

They are the tensor- and context-parallel peers of a stage and, where experts are spread over data-parallel replicas,
the stage's ranks in those replicas too. The leader sends each decision, a small number, to each of the others over a
gloo group of their own, and waits for nobody: what it decided is on its way before the leader itself begins to act.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import PrefixStore

from adaptra_megatron.runtime.gathering import gather
from adaptra_megatron.runtime.megatron_call import PipelineCall

_TAG = 1
_AHEAD = 8
"""Receives that a follower has posted: what finds one is there in one way instead of three."""
_PATIENCE_S = 10.0
"""Longer than the leader waits for a message: it knows better what is wrong."""


class StageTeamError(RuntimeError):
    """A rank of the stage does not take part any more; names this rank, the stage, that rank and the remedy."""


class StageTeam:
    """One rank's end of what the leader says. Used by one thread."""

    def __init__(self, store: Any, stage: int, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """`store`: torch.distributed's, used by this team alone. `ranks`: global ones, the leader first; `rank` is this
        one. Called by all of them at the same point.

        Raises StageTeamError when they do not come within `timeout_s`.
        """
        self.leads = rank == ranks[0]
        self._stage, self._ranks, self._rank, self._timeout_s = stage, list(ranks), rank, timeout_s
        make: Any = dist.ProcessGroupGloo
        try:
            self._group = make(store, self._ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))
        except RuntimeError as cause:
            raise self._error(f"did not meet {self._others()}", cause) from cause
        self._sent: list[tuple[int, Any, torch.Tensor]] = []
        self._expected: deque[tuple[Any, torch.Tensor]] = deque()

    def publish(self, number: int) -> None:
        """The leader says `number`. Returns at once. Raises StageTeamError for a follower that is gone."""
        said = torch.tensor([number])
        for follower in range(1, len(self._ranks)):
            try:
                self._sent.append((follower, self._group.send([said], follower, _TAG), said))
            except RuntimeError as cause:
                raise self._error(f"cannot tell rank {self._ranks[follower]} what to run", cause) from cause

    def follow(self) -> int:
        """The next number that the leader says. Raises StageTeamError if it is gone, or silent for too long."""
        timeout_s = self._timeout_s + _PATIENCE_S
        try:
            while len(self._expected) < _AHEAD:
                said = torch.empty(1, dtype=torch.int64)
                self._expected.append((self._group.recv([said], 0, _TAG), said))
            work, said = self._expected.popleft()
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as cause:
            raise self._error(
                f"heard nothing from rank {self._ranks[0]}, which decides, for {timeout_s:g} s", cause
            ) from cause
        return int(said.item())

    def settle(self) -> None:
        """Let go of what all have heard: the leader calls it when it is done with an iteration, as its followers are.

        Raises StageTeamError for a follower that has not, within the timeout.
        """
        sent, self._sent = self._sent, []
        for follower, work, _said in sent:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as cause:
                raise self._error(f"rank {self._ranks[follower]} does not follow", cause) from cause

    def _others(self) -> str:
        return "ranks " + ", ".join(str(rank) for rank in self._ranks if rank != self._rank)

    def _error(self, what: str, cause: Exception) -> StageTeamError:
        return StageTeamError(
            f"rank {self._rank}, stage {self._stage}: {what}, with {self._timeout_s:g} s of patience "
            f"(--adaptra-timeout-s); torch.distributed reported: {cause}. Ranks "
            f"{', '.join(map(str, self._ranks))} run the stage in one order: look at the first whose log stops, and "
            "restart from the last checkpoint; --adaptra-dispatch planned runs without this"
        )


class _Peers(NamedTuple):
    """A rank's, in collectives inside F, B and W, with a name for what it may lead."""

    token: str
    peers: list[int]


def form_team(call: PipelineCall, timeout_s: float) -> StageTeam | None:
    """This rank's team; None where it shares no collectives inside F, B and W with anybody.

    Collective over all ranks of the job, each with its own pipeline. Raises StageTeamError when its ranks do not meet.
    """
    rank = dist.get_rank()
    everybody = gather(_Peers(uuid.uuid4().hex, sorted(_peers(call))))
    ranks = team_of(rank, [each.peers for each in everybody])
    if len(ranks) == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    own = PrefixStore(f"adaptra/stage/{everybody[ranks[0]].token}", store.clone())
    return StageTeam(own, call.stage, ranks, rank, timeout_s)


def team_of(rank: int, peers: Sequence[Iterable[int]]) -> list[int]:
    """All ranks joined with `rank` by shared groups, however indirectly, ascending. `peers[r]`: those of rank r."""
    team, found = {rank}, [rank]
    while found:
        new = set(peers[found.pop()]) - team
        team |= new
        found += new
    return sorted(team)


def _peers(call: PipelineCall) -> Collection[int]:
    """Ranks that this one meets in collectives inside F, B and W."""
    groups = _known(call, ("tp", "cp"))
    if getattr(call.config, "num_moe_experts", None):
        groups += _known(call, ("ep", "expt_tp", "tp_ep")) or [
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        ]
    return {dist.get_rank(), *(member for group in groups for member in dist.get_process_group_ranks(group))}


def _known(call: PipelineCall, names: Iterable[str]) -> list[Any]:
    """Of the groups that the model was built with, those of these names that it has."""
    groups = (getattr(call.groups, name, None) for name in names)
    return [group for group in groups if group is not None]
