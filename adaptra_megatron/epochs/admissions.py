# SPDX-License-Identifier: Apache-2.0
"""The part that a rank which has lived on has in admitting newcomers (`admission` says how that goes)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.epochs.admission import (
    all_meet,
    call_off,
    epoch_with,
    hand_tickets,
    newcomers,
    note_admitted,
)
from adaptra_megatron.epochs.epoch import Epoch, live_ranks
from adaptra_megatron.epochs.errors import EpochEndedError, is_communication
from adaptra_megatron.epochs.live_groups import interruptible
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Membership, MembershipRecords
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)


@dataclass(frozen=True)
class Return:
    """Ranks that were admitted again."""

    epoch: Epoch
    """In which they take part first."""
    ranks: tuple[str, ...]
    """Their names."""
    seconds: float
    """For how long the others waited."""


class Admissions:
    """One rank's. For the training thread."""

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        store: SealedStore,
        records: MembershipRecords,
        timeout_s: float,
    ) -> None:
        """`store`: the training thread's, of all epochs. `records`: cloned once they are read. `timeout_s`: longest
        wait for another rank."""
        self.due: int | None = None
        """The epoch whose newcomers are to be admitted before the next iteration, once that is agreed."""
        self.hand_over: Callable[[Epoch, frozenset[int]], None] | None = None
        """Gives newcomers of an epoch what they need of this rank's state; with the ranks that have taken part before.
        None: no process can take the place of a rank that has left."""
        self.returns: list[Return] = []
        """Where this rank is the lowest of those that admitted them."""
        self._layout, self._control, self._records, self._timeout_s = layout, control, records, timeout_s
        self._store = store

    def ready(self, epoch: Epoch, newest: Membership | None) -> int | None:
        """Number of the epoch in which ranks that stand ready can be admitted, for the fate of a call that is committed
        now; None where there are none, or others are about to be."""
        if self.due is not None or self.hand_over is None or newest is None:
            return None
        # First, for what follows looks at every rank of the job, and this is asked at every commit.
        if all(each.epoch <= epoch.admitted.get(each.rank, 0) for each in newest.arrived):
            return None
        if live_ranks(self._layout, newest, epoch.admitted) != epoch.live:
            return None
        return newest.epoch if newcomers(self._layout, newest, epoch) else None

    def admit(
        self, before: Epoch, call: int, newest: Callable[[], Membership | None], heed: Callable[[], None]
    ) -> Epoch | None:
        """Have those that are due take part from call number `call` on; the epoch in which they do, or None where a
        rank dies or is late meanwhile, and all is as `before`.

        `newest`: the newest membership. `heed`: raises where the job ends. Raises what handing over raises, but for
        what may come of another's death.
        """
        assert self.due is not None
        assert self.hand_over is not None
        number, self.due, begun_s = self.due, None, time.monotonic()
        records = self._records.clone()
        membership = records.of_epoch(number)
        arrived = newcomers(self._layout, membership, before)
        epoch = epoch_with(self._layout, self._control, membership, before, arrived)

        def check() -> None:
            heed()
            seen = newest()
            if seen is None:
                return
            live = live_ranks(self._layout, seen, before.admitted)
            if (
                live != before.live
                or not arrived.keys() <= set(seen.live)
                or not set(arrived.values()) <= set(seen.arrived)
            ):
                raise EpochEndedError(f"a rank has died as ranks {sorted(arrived)} were admitted")

        leads = self._layout.rank == min(before.live)
        with epoch.control.lent("admission", self._timeout_s) as store:
            try:
                ticket = hand_tickets(self._store, epoch, call, before.live) if leads else None
                handed = functools.partial(self.hand_over, epoch, before.live)
                interruptible(handed, check, self._timeout_s, "what newcomers need")
                admitted = all_meet(store, self._layout.rank, epoch, before.live, self._timeout_s, check)
                if admitted and ticket is not None:
                    note_admitted(self._store, ticket)
                    records.say_admitted(ticket.admitted)
            except Exception as cause:
                if not is_communication(cause):
                    raise
                admitted = call_off(store)
        back = Return(epoch, tuple(map(self._layout.name, sorted(arrived))), time.monotonic() - begun_s)
        if leads:
            self._log(back, admitted=admitted)
            self.returns += [back] * admitted
        return epoch if admitted else None

    def _log(self, back: Return, *, admitted: bool) -> None:
        names = ", ".join(back.ranks)
        if admitted:
            text = "%s: back, after %.2f s in which the others waited; going on with %d of %d ranks"
            logger.warning(text, names, back.seconds, len(back.epoch.live), len(self._layout.workers))
        else:
            text = "%s: not admitted after %.2f s, as a rank has died or was late meanwhile; going on without"
            logger.warning(text, names, back.seconds)
