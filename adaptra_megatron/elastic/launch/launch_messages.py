# SPDX-License-Identifier: Apache-2.0
"""Define the records that launchers and the coordinator write for each other into the job's store.

Records are states, not events, so that no reader can miss one. Keys begin with `adaptra/launch/<run id>/` and values
are sealed; each key has one writer. Membership has keys of its own (`membership`).

    host/<node rank>/<turn>    HostReport, by the launcher of that host, with every beat
    start                      Start, by the coordinator, once all hosts have reported
    job                        JobState, by the coordinator, with every beat

A failed host may be replaced: the turn is 0 for the first host of a node rank, 1 for its replacement, and so on.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from adaptra_megatron.common.sealed_store import MOST_NBYTES, SealedStore
from adaptra_megatron.common.typed_messages import Natural, packed, unpacked

BEAT_S = 0.2
"""Time between two states of the coordinator."""
_BEAT_PER_HOST_S = 1e-3
START_KEY = "start"
JOB_KEY = "job"
KILLED_S = 10.0
"""Longest time for a killed rank to end; one that waits for a dead disk or device may never. Half of the time for which
ranks wait for the departure of a stalled one (`fault_tolerance.PATIENCE_S`).
"""
DETAILS_NCHARS = 4096
"""Maximum length of a rank's own error text; the rest is cut."""
# Endings with details, and endings of each rank, that a report keeps: 64 KiB of details at most.
_DETAILED = 16
_ENDINGS_PER_RANK = 4
Record = TypeVar("Record")


@dataclass(frozen=True)
class RankEnding:
    """End of one rank's process."""

    local_rank: Natural
    process_id: Natural
    exit_code: int
    """Exit status, or minus the signal that killed it."""
    at_s: float
    """Unix time at which the launcher saw it."""
    details: str
    """Path of its log, and the error that it wrote; several lines."""
    asked: bool = False
    """True if its launcher had asked it to end: its work was not done, whatever its exit code."""
    start: Natural = 0
    """Number of earlier starts of this rank by its launcher."""

    @property
    def failed(self) -> bool:
        """True if this rank has failed."""
        return self.asked or self.exit_code != 0

    @property
    def why(self) -> str:
        """Return the cause in one line."""
        if self.exit_code >= 0:
            return f"ended with exit status {self.exit_code}"
        known = {each.value: each.name for each in signal.Signals}
        return f"was killed by {known.get(-self.exit_code, f'signal {-self.exit_code}')}"


@dataclass(frozen=True)
class HostReport:
    """State of one host's launcher and ranks."""

    host: str
    nproc: Natural
    """Number of ranks of this host."""
    beat: Natural = 0
    endings: tuple[RankEnding, ...] = ()
    """Endings in the order in which they were seen: see `with_endings`."""
    leaving: str = ""
    """Why the launcher itself ends its ranks; empty while it does not."""
    left: bool = False
    """True if all its ranks have ended, and this is its last report."""

    def with_endings(self, endings: Iterable[RankEnding]) -> HostReport:
        """Return the report with further endings.

        Only each rank's latest endings are kept, and only the very latest with details: however often ranks are
        restarted, the report remains below `MOST_NBYTES`.
        """
        kept: list[RankEnding] = []
        count: Counter[int] = Counter()
        # From the latest on, so that the limits drop the earliest.
        for each in reversed((*self.endings, *endings)):
            count[each.local_rank] += 1
            if count[each.local_rank] <= _ENDINGS_PER_RANK:
                kept.append(each if len(kept) < _DETAILED else replace(each, details=""))
        return replace(self, endings=tuple(reversed(kept)))


@dataclass(frozen=True)
class Start:
    """Record of the coordinator: the ranks that each host is to start."""

    first_ranks: tuple[Natural, ...]
    """Global rank of local rank 0, by node rank."""
    world_size: Natural


@dataclass(frozen=True)
class LaunchOutcome:
    """End of the job."""

    failed: bool
    text: str


@dataclass(frozen=True)
class JobState:
    """State of the job that the coordinator publishes to all launchers."""

    beat: Natural
    outcome: LaunchOutcome | None
    """End of the job, upon which launchers end their ranks; None while the job runs."""
    lost: tuple[Natural, ...]
    """Node ranks of hosts that were silent and count as dead. If one of them is alive, it ends its ranks."""
    stalled: Mapping[int, int] = field(default_factory=dict)
    """Stalled ranks, and how often each had been started before: their launchers kill these processes."""
    vacant: tuple[Natural, ...] = ()
    """Node ranks that other hosts may take: of hosts that are lost or have left, except node rank 0."""
    turns: Mapping[int, int] = field(default_factory=dict)
    """Turn of each node rank that another host has taken: launchers of earlier turns, if alive, end their ranks."""
    admits_restarted: bool = False
    """True if restarted ranks can rejoin: the job survives rank failures, and has begun an iteration."""
    admitted: Mapping[int, int] = field(default_factory=dict)
    """Restarted ranks that have been admitted, and how often each had been started before."""


def beat_s(hosts: int) -> float:
    """Return the time between two routine reports of a launcher, in seconds. Changes are reported at once.

    It grows with the number of hosts, so that the store's server gets about a thousand requests a second at most.
    """
    return max(BEAT_S, hosts * _BEAT_PER_HOST_S)


def host_key(node_rank: int, turn: int = 0) -> str:
    """Return the key of a host's report."""
    return f"host/{node_rank}/{turn}"


def write(store: SealedStore, key: str, record: object) -> None:
    """Write a record under its key. Raises the errors of `SealedStore.set`."""
    store.set(key, packed(record))


def read(store: SealedStore, key: str, kind: type[Record]) -> Record | None:
    """Return the record under a key; None if there is none yet.

    Raises TamperedError, ValueError for an invalid record, and RuntimeError if the store does.
    """
    found = store.peek(key)
    return None if found is None else unpacked(found, kind, MOST_NBYTES)


# How long another process has given no sign of life, counted only while this one ran itself.

MOST_AT_ONCE_S = 4 * BEAT_S
"""Maximum silence that one observation adds. A process that was stopped, or delayed by a busy machine, observes late;
that proves nothing about its peers.
"""


class Silence:
    """Measures for how long a peer has shown no sign of life. Times are arguments (seconds of the monotonic clock)."""

    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        self._last_s = now_s
        self._sign: object = None

    def observe(self, sign: object, now_s: float) -> float:
        """Record a value that the peer changes while it lives; return for how many seconds it has been the same."""
        elapsed_s = min(now_s - self._last_s, MOST_AT_ONCE_S)
        self.silent_s = self.silent_s + elapsed_s if sign == self._sign else 0.0
        self._last_s, self._sign = now_s, sign
        return self.silent_s
