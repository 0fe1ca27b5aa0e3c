# SPDX-License-Identifier: Apache-2.0
"""Exchange entries between the stages of one pipeline, in their own part of the job's control store.

A stage's work here grows with the stages of its pipeline, not with the job: no operation is collective over more ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather_layout
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.transport.message_keys import TransportError


class Rendezvous:
    """Rendezvous of the stages of one pipeline. All create theirs, and call `gather` and `agree`, at the same
    points.
    """

    def __init__(self, control: ControlStore, layout: JobLayout, timeout_s: float, *, alone: bool = False) -> None:
        """`timeout_s`: longest wait for another stage. `alone`: act as the only stage; links are opened later."""
        self.control, self.layout, self._timeout_s, self._alone = control, layout, timeout_s, alone
        self.place = f"alone/{layout.rank}" if alone else f"pipeline/{layout.pipeline[0]}"

    @cached_property
    def _store(self) -> SealedStore:
        """Return a new store client, since a waiting request blocks all other requests of its client."""
        store = self.control.client(self.place)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout_s: float) -> Rendezvous:
        """Return the rendezvous of a process group that is both one pipeline and the whole job. All of its ranks call
        this.
        """
        layout = gather_layout(dist.get_process_group_ranks(group), group=group)
        return cls(ControlStore.of_job(layout.token), layout, timeout_s)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return 0 if self._alone else self.layout.cell.stage

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks, by stage."""
        return [self.layout.rank] if self._alone else self.layout.pipeline

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    def name(self, stage: int) -> str:
        """Return the name of a stage in messages."""
        return self.layout.name(self.ranks[stage])

    def gather(self, what: str, mine: Any) -> list[Any]:
        """Return the entries (plain JSON) of all stages, by stage. `what` must differ between calls.

        Raises TransportError for the first stage that does not come in time, or whose entry is not authentic; later
        stages raise the same.
        """
        handed_in = []
        for answer in self._answers(what, mine):
            # The failure is in the place of the entry: later stages need not wait for their own time limit.
            if "gave_up" in answer:
                raise TransportError(answer["gave_up"])
            handed_in.append(answer["handed_in"])
        return handed_in

    def _answers(self, what: str, mine: Any) -> Iterator[dict[str, Any]]:
        """Publish this stage's entry; return those of all stages, by stage, or the failure that one published.

        Raises TransportError for the first stage that does not come in time, after publishing that failure in place of
        its own entry.
        """
        # One by one, in the same order everywhere: all stages name the same one as the first that is missing.
        since_s, stage = time.monotonic(), 0
        try:
            self._put(what, {"handed_in": mine})
            for stage in range(self.stages):
                yield json.loads(self._store.get(f"{what}/{stage}"))
        except RuntimeError as cause:
            waited_s = time.monotonic() - since_s
            error = (
                f"{self.name(self.stage)} has waited {waited_s:.3g} s of at most {self._timeout_s:g} s "
                f"(--adaptra-timeout-s) in vain for {self.name(stage)} to set up the links of their pipeline: "
                f"{cause}. Look at the first rank whose log stops"
            )
            with suppress(RuntimeError):  # a store that is gone
                self._put(what, {"gave_up": error})
            raise TransportError(error) from cause

    def _put(self, what: str, mine: Any) -> None:
        self._store.set(f"{what}/{self.stage}", json.dumps(mine).encode())

    def agree(self, what: str, failure: Exception | None) -> str | None:
        """Return why not all stages can continue, in words; None if all can. The result is the same on all stages.

        `what` must differ between calls. `failure`: why this stage cannot continue.
        """
        mine = None if failure is None else _spelled(failure)
        stages_by_cause: dict[str, list[int]] = {}
        for stage, cause in enumerate(self.gather(what, mine)):
            if cause is not None:
                stages_by_cause.setdefault(cause, []).append(stage)
        return (
            "; ".join(f"{', '.join(map(self.name, stages))}: {cause}" for cause, stages in stages_by_cause.items())
            or None
        )

    def first_of_the_job_to(self, what: str) -> bool:
        """Return whether this rank is the first of the job to call this with `what`."""
        with self.control.lent("first", self._timeout_s) as store:
            # The store adds for one client at a time: exactly one gets 1.
            return bool(store.add(what, 1) == 1)


def agree_on_host_path(rendezvous: Rendezvous, what: str, failure: Exception | None) -> None:
    """Raise TransportError, alike on all stages, if any has a `failure` that rules out the host path.

    `what`: see `Rendezvous.agree`.
    """
    causes = rendezvous.agree(what, failure)
    if causes is not None:
        raise TransportError(
            f"the host path cannot be set up: {causes}; --adaptra-host-transport off runs without the host path"
        ) from failure


def _spelled(failure: Exception) -> str:
    return str(failure) if isinstance(failure, TransportError) else f"{type(failure).__name__}: {failure}"
