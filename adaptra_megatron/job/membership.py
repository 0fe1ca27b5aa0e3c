# SPDX-License-Identifier: Apache-2.0
"""Membership of a job that `adaptra launch` runs: one record per epoch, which ranks that outlive others read.

Keys in the job's store, below `adaptra/launch/<run id>/`, all sealed by the job's secret and but for the last written
by the launcher's coordinator alone:

    membership/<epoch>    the `Membership` of that epoch, written once and never changed; epoch 0 before any rank starts
    membership/newest     the number of the last epoch, written after its record
    membership/stalled    by a rank: the `Stalled` that the launcher is to end
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.authentication.tagged_json import Natural, packed, unpacked
from adaptra_megatron.job.control_store import job_secret

_MOST_NBYTES = 1 << 24
_NEWEST = "membership/newest"
_STALLED = "membership/stalled"


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
class Membership:
    """Ranks that live in one epoch: all of the job but those that left. All have lived since epoch 0.

    A rank that ended with status 0 has done its work: it has not left, and makes no new epoch.
    """

    epoch: Natural
    world_size: Natural
    at_s: float
    """Unix time at which the epoch began, of the coordinator's host."""
    left: tuple[Departure, ...]
    """In the order in which they left."""

    @property
    def live(self) -> tuple[int, ...]:
        """Ranks in ascending order."""
        gone = {each.rank for each in self.left}
        return tuple(rank for rank in range(self.world_size) if rank not in gone)


@dataclass(frozen=True)
class Stalled:
    """Ranks that stand still, as the others have found: their launchers end them."""

    ranks: tuple[Natural, ...]
    why: str
    """What each has done: one line."""


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

    def publish(self, membership: Membership) -> None:
        """Write the record of a new epoch. The coordinator alone does. Raises RuntimeError where the store does."""
        self._store.set(f"membership/{membership.epoch}", packed(membership))
        self._store.set(_NEWEST, str(membership.epoch).encode())

    def report(self, stalled: Stalled) -> None:
        """Have the launcher end ranks that stand still. Raises RuntimeError where the store does."""
        self._store.set(_STALLED, packed(stalled))

    def stalled(self) -> Stalled | None:
        """What was reported last. Raises as `newest`."""
        found = self._store.peek(_STALLED)
        return None if found is None else unpacked(found, Stalled, _MOST_NBYTES)

    def newest(self) -> Membership | None:
        """The last epoch's record; None under a launcher that keeps none, such as torchrun. Never waits for a record.

        Raises TamperedError, ValueError for what is no record, and RuntimeError where the store does.
        """
        epoch = self._store.peek(_NEWEST)
        return None if epoch is None else self._read(int(epoch))

    def wait_beyond(self, epoch: int, timeout_s: float) -> Membership | None:
        """The last epoch's record once there is one after `epoch`; None if there is none within `timeout_s`.

        Raises as `newest`.
        """
        try:
            self._store.wait([f"membership/{epoch + 1}"], timedelta(seconds=timeout_s))
        except DistStoreError:
            return None
        newest = self.newest()
        return newest if newest is not None and newest.epoch > epoch else self._read(epoch + 1)

    def _read(self, epoch: int) -> Membership:
        found: Membership = unpacked(self._store.get(f"membership/{epoch}"), Membership, _MOST_NBYTES)
        return found


def launch_store(store: Any, run_id: str) -> SealedStore:
    """Part of the job's store that belongs to its launcher. `store`: torch.distributed's, without a prefix.

    Raises as `job_secret`.
    """
    place = f"adaptra/launch/{run_id}"
    return SealedStore(PrefixStore(place, store), job_secret(store), place)
