# SPDX-License-Identifier: Apache-2.0
"""A process that takes the place of a rank that had left: from its first word to its first iteration."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.authentication.tagged_json import unpacked
from adaptra_megatron.epochs.admission import all_meet, read_ticket
from adaptra_megatron.epochs.epoch import Epoch
from adaptra_megatron.epochs.errors import EpochEndedError, UnrecoverableError
from adaptra_megatron.epochs.last_word import heed
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.identity import host_identity
from adaptra_megatron.job.layout import JobLayout, LayoutRecord
from adaptra_megatron.job.membership import START_VARIABLE, Arrival, Departure, MembershipRecords, Readiness
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

_MOST_NBYTES = 1 << 26
_SEEN_S, _LOOKS_S = 60.0, 0.05


@dataclass(frozen=True)
class Joined:
    """What a process is part of once it has been called in."""

    layout: JobLayout
    control: ControlStore
    epoch: Epoch
    before: frozenset[int]
    """Ranks that have taken part before."""
    call: int
    """Number of the first call of Megatron's schedules that it takes part in."""
    left: Sequence[Departure]
    """All so far."""


class Newcomer:
    """One process, until it trains with the others. For the training thread."""

    def __init__(self, place: Departure, records: MembershipRecords, timeout_s: float | None) -> None:
        """`place`: that it takes. `timeout_s`: longest wait for others; None: that of torch.distributed.

        Raises UnrecoverableError where the job has not begun, RuntimeError where a store cannot be reached."""
        self._place, self._records = place, records
        found = records.layout()
        if found is None:
            raise UnrecoverableError(
                f"rank {place.rank} has been started again, but the job has not begun an iteration that it could join"
            )
        record: LayoutRecord = unpacked(found, LayoutRecord, _MOST_NBYTES)
        self.layout = JobLayout.recorded(record, place.rank)
        self.control = ControlStore.of_job(record.token)
        self.timeout_s = self.control.timeout_s if timeout_s is None else timeout_s

    def stand_ready(self) -> Joined:
        """Say so, and wait until the others call this process in, before one of their next iterations.

        Raises UnrecoverableError where they do not within the timeout, RuntimeError where a store does.
        """
        place, identity = self._place, host_identity()
        ready = Readiness(place.epoch, int(os.environ[START_VARIABLE]), socket.gethostname(), identity)
        self.layout.move(place.rank, ready.host, identity)
        self._records.say_ready(place.rank, ready)
        arrival = self._arrival(ready)
        store = self.control.client("survival")

        def check() -> None:
            heed(store, self.layout.name(place.rank))
            time.sleep(_LOOKS_S)

        ticket = read_ticket(store, arrival, self.timeout_s, check)
        membership = self._records.of_epoch(ticket.epoch)
        for each in membership.arrived:
            self.layout.move(each.rank, each.ready.host, each.ready.identity)
        live = frozenset(ticket.live)
        dead = frozenset(worker.cell for rank, worker in self.layout.workers.items() if rank not in live)
        control = self.control.in_epoch(ticket.epoch)
        epoch = Epoch(ticket.epoch, live, dead, control, ticket.admitted, ticket.epoch)
        return Joined(self.layout, self.control, epoch, frozenset(ticket.before), ticket.call, membership.left)

    def check(self, joined: Joined) -> None:
        """Raise EpochEndedError once a rank has died. Takes a moment."""
        newest = self._records.newest()
        if newest is not None and not joined.epoch.live <= set(newest.live):
            raise EpochEndedError(f"a rank has died while {self.layout.name(self.layout.rank)} was to take its place")
        time.sleep(_LOOKS_S)

    def meet(self, joined: Joined) -> None:
        """Come to the point from which all train together. Raises UnrecoverableError where another rank has died or was
        late meanwhile, so that this process has no place."""
        check = functools.partial(self.check, joined)
        with joined.epoch.control.lent("admission", self.timeout_s) as store:
            if not all_meet(store, self.layout.rank, joined.epoch, joined.before, self.timeout_s, check):
                raise UnrecoverableError(
                    f"{self.layout.name(self.layout.rank)} has not been admitted, as another rank has died or was late "
                    "meanwhile"
                )

    def _arrival(self, ready: Readiness) -> Arrival:
        deadline_s = time.monotonic() + _SEEN_S
        while time.monotonic() < deadline_s:
            newest = self._records.newest()
            for each in () if newest is None else newest.arrived:
                if (each.rank, each.ready) == (self._place.rank, ready):
                    return each
            time.sleep(_LOOKS_S)
        raise UnrecoverableError(
            f"rank {self._place.rank}, started again, stands ready, but its launcher's coordinator has not seen that "
            f"within {_SEEN_S:g} s; look at the launcher of node rank 0"
        )
