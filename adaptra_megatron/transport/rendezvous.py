# SPDX-License-Identifier: Apache-2.0
"""Where the stages of one pipeline meet: the job's own store, under a prefix that no other meeting has.

What a stage does here grows with the stages of its pipeline, not with the job: nothing is collective over more ranks.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from adaptra_megatron.transport.messages import TransportError


class Rendezvous:
    """One stage's. All stages of a pipeline make theirs, and call `gather` and `agree`, at the same points."""

    def __init__(self, store: Any, ranks: Sequence[int], stage: int, timeout_s: float) -> None:
        """`store`: the job's, of torch.distributed. `ranks`: global ones, of all stages. `timeout_s`: longest wait for
        another stage.

        Returns when all stages have come. Raises TransportError for the first that has not in time.
        """
        self.stage, self.ranks, self._timeout_s = stage, ranks, timeout_s
        # A client of its own, for what waits in one keeps all others waiting that share it.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=timeout_s))
        pipeline = f"adaptra/pipeline/{','.join(map(str, self.ranks))}"
        self._prefix = f"{pipeline}/{self._store.add(f'{pipeline}/made/{self.stage}', 1)}"
        self._hosts: Sequence[str] = ["an unknown host"] * self.stages
        self._hosts = self.gather("hosts", socket.gethostname())

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout_s: float) -> Rendezvous:
        """That of a pipeline's process group, in the store of the job that torch.distributed was initialised for."""
        return cls(_get_default_store(), dist.get_process_group_ranks(group), group.rank(), timeout_s)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def name(self, stage: int) -> str:
        """A stage in messages."""
        return f"rank {self.ranks[stage]} (stage {stage} on {self._hosts[stage]})"

    def gather(self, what: str, mine: Any) -> list[Any]:
        """What each stage hands in, by stage, once all have: plain JSON. `what` is different in each call.

        Raises TransportError for the first stage that does not come in time.
        """
        answers, since_s = [], time.monotonic()
        self._store.set(f"{self._prefix}/{what}/{self.stage}", json.dumps(mine))
        for stage in range(self.stages):
            try:
                answers.append(json.loads(self._store.get(f"{self._prefix}/{what}/{stage}")))
            except RuntimeError as cause:
                waited_s = time.monotonic() - since_s
                raise TransportError(
                    f"{self.name(self.stage)} has waited {waited_s:.3g} s of at most {self._timeout_s:g} s "
                    f"(--adaptra-timeout-s) in vain for {self.name(stage)} to set up the links of their pipeline: "
                    f"{cause}. Look at the first rank whose log stops"
                ) from cause
        return answers

    def agree(self, what: str, failure: Exception | None) -> str | None:
        """Why not all stages can go on, in words; None where all can. The same on all stages.

        `what` is different in each call. `failure`: what keeps this stage from going on; None: nothing.
        """
        mine = None if failure is None else _spelled(failure)
        stages_by_cause: dict[str, list[int]] = {}
        for stage, told in enumerate(self.gather(what, mine)):
            if told is not None:
                stages_by_cause.setdefault(told, []).append(stage)
        return (
            "; ".join(f"{', '.join(map(self.name, stages))}: {told}" for told, stages in stages_by_cause.items())
            or None
        )

    def first_of_the_job_to(self, what: str) -> bool:
        """Whether no other rank of the job has asked this before."""
        return bool(self._store.add(f"adaptra/first/{what}", 1) == 1)

    def client(self, name: str) -> Any:
        """A torch.distributed store for one user: keys of its own, shared with those of the same name."""
        return PrefixStore(f"{self._prefix}/{name}", self._store.clone())


def _spelled(failure: Exception) -> str:
    return str(failure) if isinstance(failure, TransportError) else f"{type(failure).__name__}: {failure}"
