# SPDX-License-Identifier: Apache-2.0
"""Membership of a job that `adaptra launch` runs: one record per epoch, which live ranks read.

Keys in the job's store, below `adaptra/launch/<run id>/`, all sealed by the job's secret and written
by the launcher's coordinator alone, where nothing else is said:

    membership/<epoch>    the `Membership` of that epoch, written once and never changed; the latest 256 are kept, and
                          epoch 0 is there before any rank starts
    membership/newest     the number of the last epoch, written after its record
    membership/admitted   by the leading rank: ranks that were started again and train, with epochs of arrivals
    membership/stalled    by a rank: the `Stalled` that the launcher is to end
    membership/layout     by the lowest live rank: the job's layout, for workers that are started again
    membership/ready/R    by rank R, started again: its `Readiness`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

from adaptra_megatron.common.control_store import job_secret
from adaptra_megatron.common.environment import START_VARIABLE as START_VARIABLE
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import Natural, packed, unpacked

_MOST_NBYTES = 1 << 22
"""torch's TCPStore carries 8 MiB."""
_KEPT_EPOCHS = 256
_NEWEST = "membership/newest"
_STALLED = "membership/stalled"
_ADMITTED = "membership/admitted"
_LAYOUT = "membership/layout"
_READY = "membership/ready"


@dataclass(frozen=True)
class Departure:
    """A rank that the job has lost."""

    rank: Natural
    epoch: Natural
    """First epoch without it."""
    host: str
    why: str
    """One line: exit status, signal, or a host that was silent for so many seconds."""
    at_s: float
    """Unix time, of the host that saw it."""


@dataclass(frozen=True)
class Readiness:
    """A process stands ready in the place of one that had left."""

    left: Natural
    """The epoch of that departure."""
    start: Natural
    """How often its launcher had started this rank before."""
    host: str
    """Name of its host."""
    identity: str
    """See `identity.host_identity`."""


@dataclass(frozen=True)
class Arrival:
    """A rank that had left and stands ready again."""

    rank: Natural
    epoch: Natural
    """The first with it."""
    ready: Readiness


@dataclass(frozen=True)
class Membership:
    """Ranks that live in one epoch: all of the job but those that left and have not arrived again.

    A rank that ended with status 0 has done its work: it has not left, and makes no new epoch.
    """

    epoch: Natural
    world_size: Natural
    at_s: float
    """Unix time at which the epoch began, of the coordinator's host."""
    left: tuple[Departure, ...]
    """In the order in which they left; a rank that has arrived again may leave again."""
    arrived: tuple[Arrival, ...] = ()
    """The last one of each rank that has left and stood ready again. The others train with it once they have met."""

    @property
    def live(self) -> tuple[int, ...]:
        """Ranks in ascending order."""
        back = {each.rank: each.epoch for each in self.arrived}
        gone = {each.rank for each in self.left if each.epoch > back.get(each.rank, 0)}
        return tuple(rank for rank in range(self.world_size) if rank not in gone)

    def departure(self, rank: int) -> Departure:
        """The last one of a rank that has left."""
        return next(each for each in reversed(self.left) if each.rank == rank)

    def without(self, departed: Sequence[Departure], at_s: float) -> Membership:
        """Return the next epoch, which is that of all `departed`."""
        return replace(self, epoch=self.epoch + 1, at_s=at_s, left=(*self.left, *departed))

    def with_ready(self, ready: Mapping[int, Readiness], at_s: float) -> Membership:
        """Return the next epoch, in which processes stand ready in the places of these ranks, which had left."""
        epoch = self.epoch + 1
        arrivals = (Arrival(rank, epoch, each) for rank, each in sorted(ready.items()))
        earlier = (each for each in self.arrived if each.rank not in ready)
        return replace(self, epoch=epoch, at_s=at_s, arrived=(*earlier, *arrivals))


@dataclass(frozen=True)
class Stalled:
    """Ranks that stand still, as the others have found: their launchers kill these processes, and none that follow."""

    ranks: tuple[Natural, ...]
    why: str
    """What each has done: one line."""
    arrivals: Mapping[int, int]
    """Epochs of the arrivals of those of them that were started again, by rank. May name other ranks, too."""


class MembershipRecords:
    """Records of all epochs in the job's store. Not for two threads at once: a client answers one request at a time."""

    def __init__(self, store: SealedStore) -> None:
        """`store`: of `launch_store`."""
        self._store = store

    @classmethod
    def of_rank(cls, timeout_s: float, environment: Mapping[str, str] = os.environ) -> MembershipRecords:
        """Records for a rank, over a connection of its own. `timeout_s`: to connect, and of each request.

        Raises KeyError outside of a launched rank, RuntimeError if the store cannot be reached, and as `job_secret`.
        """
        store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(launch_store(store, environment["TORCHELASTIC_RUN_ID"]))

    def clone(self) -> MembershipRecords:
        """The same for another thread. Raises RuntimeError if the store cannot be reached."""
        return MembershipRecords(self._store.clone())

    def publish(self, membership: Membership) -> None:
        """Write the record of a new epoch. The coordinator alone does. Raises RuntimeError where the store does."""
        self._store.set(f"membership/{membership.epoch}", packed(membership))
        self._store.set(_NEWEST, str(membership.epoch).encode())
        if membership.epoch >= _KEPT_EPOCHS:
            self._store.delete_key(f"membership/{membership.epoch - _KEPT_EPOCHS}")

    def say_admitted(self, admitted: Mapping[int, int]) -> None:
        """Write down all ranks that were started again and train with the others: the epoch of the arrival of each, by
        rank. The launcher ends a job in which none is left that trains. Raises RuntimeError where the store does."""
        self._store.set(_ADMITTED, packed(admitted))

    def admitted(self) -> Mapping[int, int]:
        """Return what `say_admitted` has written last. Raises as `newest`."""
        found = self._store.peek(_ADMITTED)
        return {} if found is None else unpacked(found, Mapping[int, int], _MOST_NBYTES)

    def report(self, stalled: Stalled) -> None:
        """Have the launcher end ranks that stand still. Raises RuntimeError where the store does."""
        self._store.set(_STALLED, packed(stalled))

    def stalled(self) -> Stalled | None:
        """Return what was reported last. Raises as `newest`."""
        found = self._store.peek(_STALLED)
        return None if found is None else unpacked(found, Stalled, _MOST_NBYTES)

    def publish_layout(self, layout: bytes) -> None:
        """Write the job's layout. Raises RuntimeError where the store does."""
        self._store.set(_LAYOUT, layout)

    def layout(self) -> bytes | None:
        """The job's; None before the first iteration. Raises TamperedError, and RuntimeError where the store does."""
        found: bytes | None = self._store.peek(_LAYOUT)
        return found

    def say_ready(self, rank: int, ready: Readiness) -> None:
        """This process stands ready in the place of `rank`. Raises RuntimeError where the store does."""
        self._store.set(f"{_READY}/{rank}", packed(ready))

    def readiness(self, rank: int) -> Readiness | None:
        """Return what the process in the place of a rank has said last. Raises as `newest`."""
        found = self._store.peek(f"{_READY}/{rank}")
        return None if found is None else unpacked(found, Readiness, _MOST_NBYTES)

    def newest(self) -> Membership | None:
        """The last epoch's record; None under a launcher that keeps none, such as torchrun. Never waits for a record.

        Raises TamperedError, ValueError for what is no record, and RuntimeError where the store does.
        """
        epoch = self._store.peek(_NEWEST)
        return None if epoch is None else self.of_epoch(int(epoch))

    def wait_beyond(self, epoch: int, timeout_s: float) -> Membership | None:
        """The last epoch's record once there is one after `epoch`; None if there is none within `timeout_s`.

        Raises as `newest`.
        """
        newest = self.newest()
        if newest is not None and newest.epoch > epoch:  # the record after `epoch` may have been deleted since
            return newest
        try:
            self._store.wait([f"membership/{epoch + 1}"], timedelta(seconds=timeout_s))
        except DistStoreError:
            return None
        newest = self.newest()
        return newest if newest is not None and newest.epoch > epoch else self.of_epoch(epoch + 1)

    def of_epoch(self, epoch: int) -> Membership:
        """The record of one of the latest epochs that have begun. Raises as `newest`."""
        found: Membership = unpacked(self._store.get(f"membership/{epoch}"), Membership, _MOST_NBYTES)
        return found


def launch_store(store: Any, run_id: str) -> SealedStore:
    """Part of the job's store that belongs to its launcher. `store`: torch.distributed's, without a prefix.

    Raises as `job_secret`.
    """
    place = f"adaptra/launch/{run_id}"
    return SealedStore(PrefixStore(place, store), job_secret(store), place)
