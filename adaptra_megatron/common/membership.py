# SPDX-License-Identifier: Apache-2.0
"""Membership of a job that `adaptra launch` runs: one record per epoch, which live ranks read.

Keys in the job's store begin with `adaptra/launch/<run id>/`, and values are sealed with the job's secret. The
launcher's coordinator writes them, unless stated otherwise:

    membership/<epoch>    the `Membership` of that epoch, written once and never changed; the latest 256 are kept, and
                          epoch 0 is there before any rank starts
    membership/newest     the number of the last epoch, written after its record
    membership/admitted   by the leading rank: restarted ranks that train, with the epochs of their arrivals
    membership/stalled    by a rank: the `Stalled` ranks that the launcher must end
    membership/layout     by the lowest live rank: the job's layout, for restarted ranks
    membership/ready/R    by the restarted rank R: its `Readiness`
    membership/groups/N   by rank 0: keys of all parameter groups of the optimizer with number N, for restarted ranks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

from adaptra_megatron.common.control_store import DeadlineStore, job_secret
from adaptra_megatron.common.environment import START_VARIABLE as START_VARIABLE
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import Natural, packed, unpacked

_MOST_NBYTES = 1 << 26
"""Maximum size of a record. One of 16,384 ranks has 1 MiB after 7,000 departures."""
_KEPT_EPOCHS = 256
_NEWEST = "membership/newest"
_STALLED = "membership/stalled"
_ADMITTED = "membership/admitted"
_LAYOUT = "membership/layout"
_READY = "membership/ready"
_GROUPS = "membership/groups"


@dataclass(frozen=True)
class Departure:
    """A rank that the job has lost."""

    rank: Natural
    epoch: Natural
    """First epoch without the rank."""
    host: str
    why: str
    """Cause, in one line: exit status, signal, or for how many seconds its host was silent."""
    at_s: float
    """Unix time on the host that detected it."""


@dataclass(frozen=True)
class Readiness:
    """Notice of a restarted rank that its process is ready to rejoin."""

    left: Natural
    """Epoch of the rank's departure."""
    start: Natural
    """Number of earlier starts of the rank by its launcher."""
    host: str
    """Name of its host."""
    identity: str
    """See `layout.host_identity`."""


@dataclass(frozen=True)
class Arrival:
    """A departed rank that is ready to rejoin."""

    rank: Natural
    epoch: Natural
    """First epoch with the rank."""
    ready: Readiness


@dataclass(frozen=True)
class Membership:
    """Live ranks of one epoch: all ranks of the job except those that left and have not arrived again.

    A rank that ended with status 0 has finished. It has not left, and begins no new epoch.
    """

    epoch: Natural
    world_size: Natural
    at_s: float
    """Unix time at which the epoch began, on the coordinator's host."""
    left: tuple[Departure, ...]
    """Departures in order; a rank that has arrived again may leave again."""
    arrived: tuple[Arrival, ...] = ()
    """Latest arrival of each rank that left and became ready again. The others train with it once they have met."""

    @property
    def live(self) -> tuple[int, ...]:
        """Live ranks in ascending order."""
        back = {each.rank: each.epoch for each in self.arrived}
        gone = {each.rank for each in self.left if each.epoch > back.get(each.rank, 0)}
        return tuple(rank for rank in range(self.world_size) if rank not in gone)

    def departure(self, rank: int) -> Departure:
        """Return the latest departure of a rank that has left."""
        return next(each for each in reversed(self.left) if each.rank == rank)

    def without(self, departed: Sequence[Departure], at_s: float) -> Membership:
        """Return the next epoch, without the ranks in `departed`."""
        return replace(self, epoch=self.epoch + 1, at_s=at_s, left=(*self.left, *departed))

    def with_ready(self, ready: Mapping[int, Readiness], at_s: float) -> Membership:
        """Return the next epoch, in which these departed ranks are ready to rejoin."""
        epoch = self.epoch + 1
        arrivals = (Arrival(rank, epoch, each) for rank, each in sorted(ready.items()))
        earlier = (each for each in self.arrived if each.rank not in ready)
        return replace(self, epoch=epoch, at_s=at_s, arrived=(*earlier, *arrivals))


@dataclass(frozen=True)
class Stalled:
    """Ranks that the others found stalled. Their launchers kill these processes, but not their replacements."""

    ranks: tuple[Natural, ...]
    why: str
    """Observation, in one line."""
    arrivals: Mapping[int, int]
    """Epoch of the latest arrival of each restarted rank among them, by rank. May name other ranks, too."""


class MembershipRecords:
    """Records of all epochs in the job's store. For one thread at a time: a client handles one request at a time."""

    def __init__(self, store: SealedStore) -> None:
        """`store`: a client as `launch_store` returns."""
        self._store = store
        self._last: Membership | None = None
        """The record that was read last: they are polled for, and never change."""

    @classmethod
    def of_rank(cls, timeout_s: float, environment: Mapping[str, str] = os.environ) -> MembershipRecords:
        """Return the records for a rank, over a connection of its own. `timeout_s`: to connect, and of each request.

        Raises KeyError if no launcher started this rank, RuntimeError if the store cannot be reached, and as
        `job_secret`.
        """
        store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(launch_store(store, environment["TORCHELASTIC_RUN_ID"]))

    @contextmanager
    def lent(self, timeout_s: float) -> Iterator[MembershipRecords]:
        """Lend the records over a new connection, for another thread. `timeout_s`, errors: see `DeadlineStore`."""
        with closing(DeadlineStore(self._store.clone, timeout_s)) as store:
            yield MembershipRecords(self._store.over(store))

    def publish(self, membership: Membership) -> None:
        """Write the record of a new epoch. For the coordinator alone. Raises RuntimeError if the store does."""
        self._store.set_parts(f"membership/{membership.epoch}", packed(membership))
        self._store.set(_NEWEST, str(membership.epoch).encode())
        if membership.epoch >= _KEPT_EPOCHS:
            self._store.delete_key(f"membership/{membership.epoch - _KEPT_EPOCHS}")

    def say_admitted(self, admitted: Mapping[int, int]) -> None:
        """Write the restarted ranks that train with the others: epoch of the arrival, by rank.

        The launcher ends a job in which no rank trains any more. Raises RuntimeError if the store cannot be reached.
        """
        self._store.set(_ADMITTED, packed(admitted))

    def admitted(self) -> Mapping[int, int]:
        """Return the mapping that `say_admitted` wrote last. Raises the errors of `newest`."""
        found = self._store.peek(_ADMITTED)
        return {} if found is None else unpacked(found, Mapping[int, int], _MOST_NBYTES)

    def report(self, stalled: Stalled) -> None:
        """Report stalled ranks to the launcher, which ends them. Raises RuntimeError if the store does."""
        self._store.set(_STALLED, packed(stalled))

    def stalled(self) -> Stalled | None:
        """Return the latest report of stalled ranks. Raises the errors of `newest`."""
        found = self._store.peek(_STALLED)
        return None if found is None else unpacked(found, Stalled, _MOST_NBYTES)

    def publish_layout(self, layout: bytes) -> None:
        """Write the job's layout, once. Raises RuntimeError if the store does."""
        self._store.set_parts(_LAYOUT, layout)

    def layout(self) -> bytes | None:
        """Return the job's layout; None before the first iteration. Raises TamperedError, and RuntimeError if the store
        cannot be reached.
        """
        found: bytes | None = self._store.peek(_LAYOUT)
        return found

    def publish_groups(self, number: int, keys: str) -> None:
        """Write the keys of all parameter groups of an optimizer. Raises RuntimeError if the store does."""
        self._store.set(f"{_GROUPS}/{number}", keys.encode())

    def groups(self, number: int) -> str:
        """Return what `publish_groups` wrote; "" if it has not yet. Raises as `layout`."""
        return (self._store.peek(f"{_GROUPS}/{number}") or b"").decode()

    def say_ready(self, rank: int, ready: Readiness) -> None:
        """Write that this process is ready to rejoin as `rank`. Raises RuntimeError if the store does."""
        self._store.set(f"{_READY}/{rank}", packed(ready))

    def readiness(self, rank: int) -> Readiness | None:
        """Return the latest notice of a process that replaces `rank`. Raises the errors of `newest`."""
        found = self._store.peek(f"{_READY}/{rank}")
        return None if found is None else unpacked(found, Readiness, _MOST_NBYTES)

    def newest(self) -> Membership | None:
        """Return the last epoch's record; None under a launcher that writes none, such as torchrun. Never waits.

        Raises TamperedError, ValueError for an invalid record, and RuntimeError if the store cannot be reached.
        """
        epoch = self._store.peek(_NEWEST)
        return None if epoch is None else self.of_epoch(int(epoch))

    def wait_beyond(self, epoch: int, timeout_s: float) -> Membership | None:
        """Return the last epoch's record once its epoch is after `epoch`; None if there is none within `timeout_s`.

        Raises the errors of `newest`.
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
        """Return the record of one of the latest epochs. Raises the errors of `newest`."""
        last = self._last
        if last is None or last.epoch != epoch:
            last = self._last = unpacked(self._store.get(f"membership/{epoch}"), Membership, _MOST_NBYTES)
        return last


def launch_store(store: Any, run_id: str) -> SealedStore:
    """Return a client for the launcher's part of the job's store. `store`: torch.distributed's, without a prefix.

    Raises the errors of `job_secret`.
    """
    place = f"adaptra/launch/{run_id}"
    return SealedStore(PrefixStore(place, store), job_secret(store), place)
