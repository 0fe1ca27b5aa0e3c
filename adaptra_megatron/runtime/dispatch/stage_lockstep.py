# SPDX-License-Identifier: Apache-2.0
"""Ranks that share collectives inside F, B and W run them in one order: one of them decides, the others follow.

They are the tensor- and context-parallel peers of a stage and, where experts are spread over data-parallel replicas,
the stage's ranks in those replicas too. The leader sends each decision, a small number, to each of the others over a
gloo group of their own, and does not wait: what it decided is on its way before the leader itself begins to act.
"""

from __future__ import annotations

import contextlib
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from adaptra_megatron.epochs.errors import LateRankError
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.process_groups import epoch_group

_TAG, _LIFELINE_TAG = 1, 2
_EXPIRED = timedelta(milliseconds=1)
_AHEAD = 8
"""Receives that a follower has posted: what finds one is there in one way instead of three."""
_PATIENCE_S = 10.0
"""Longer than the leader waits for a message: it knows better what is wrong."""


class StageTeamError(LateRankError):
    """A rank of the stage does not take part any more; names this rank, the stage, that rank and the remedy."""


class StageTeam:
    """One rank's end of what the leader of its cell says. Used by one thread, but for `abort`."""

    def __init__(self, control: ControlStore, layout: JobLayout, timeout_s: float) -> None:
        """Called by all ranks of the cell at the same point. Raises StageTeamError when they do not come within
        `timeout_s`."""
        cell = layout.cell
        self._stage, self._ranks, self._rank, self._timeout_s = cell.stage, layout.cells[cell], layout.rank, timeout_s
        self.leads = self._rank == layout.reporter(cell)
        try:
            name = f"cell/{cell.replica}-{cell.stage}"
            self._group = epoch_group(control, name, self._ranks, self._rank, timeout_s)
        except RuntimeError as cause:
            raise self._error(f"did not meet {self._others()}", cause) from cause
        # Never answered: gloo closes connections, which ends all waits, where one such wait expires.
        self._lifeline: Any = self._group.recv([torch.empty(1)], int(self.leads), _LIFELINE_TAG)
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
                f"received nothing from rank {self._ranks[0]}, which decides, for {timeout_s:g} s", cause
            ) from cause
        return int(said.item())

    def settle(self) -> None:
        """Drop what all have received: the leader calls it when it is done with an iteration, as its followers are.

        Raises StageTeamError for a follower that has not, within the timeout.
        """
        sent, self._sent = self._sent, []
        for follower, work, _said in sent:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as cause:
                raise self._error(f"rank {self._ranks[follower]} does not follow", cause) from cause

    def abort(self) -> None:
        """Give the team up: every wait of this rank raises, and of others for it. Safe to call twice, and from any
        thread."""
        with contextlib.suppress(RuntimeError):
            self._lifeline.wait(_EXPIRED)

    def _others(self) -> str:
        return "ranks " + ", ".join(str(rank) for rank in self._ranks if rank != self._rank)

    def _error(self, what: str, cause: Exception) -> StageTeamError:
        return StageTeamError(
            f"rank {self._rank}, stage {self._stage}: {what}, with {self._timeout_s:g} s of patience "
            f"(--adaptra-timeout-s); torch.distributed reported: {cause}. Ranks "
            f"{', '.join(map(str, self._ranks))} run the stage in one order: look at the first whose log stops, and "
            "restart from the last checkpoint; --adaptra-dispatch planned runs without this"
        )
