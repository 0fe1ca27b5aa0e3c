# SPDX-License-Identifier: Apache-2.0
"""What a host thread of a rank calls, as the model of the device understands it.

A thread's program is a sequence of these. Those that put work on a stream are numbered from 0 in the order in which the
thread calls them; `after` names works by these numbers, as events that were recorded behind them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Rank(NamedTuple):
    """One process with one device."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"replica {self.replica} stage {self.stage}"


class Communicator(NamedTuple):
    """What is one communicator at all its members: of the stages of a pipeline, or of the replicas of a stage."""

    name: str
    of_stage: bool = False
    stages: frozenset[int] | None = None
    """Members, if not all stages of a pipeline are."""

    def key(self, rank: Rank) -> Hashable:
        """The same at all members and nowhere else."""
        if self.stages is not None and rank.stage not in self.stages:
            return rank
        return (self.name, "stage", rank.stage) if self.of_stage else (self.name, "replica", rank.replica)


class Compute(NamedTuple):
    """Kernels of one action."""

    stream: str
    seconds: float
    label: Hashable = None
    after: tuple[int, ...] = ()


class Transfer(NamedTuple):
    """One message between two stages; the end that names it is the stage whose program it is in."""

    source: int
    target: int
    message: Hashable
    seconds: float = 0.0


class Transfers(NamedTuple):
    """One kernel of NCCL that sends and receives: one message, or those of a group (ncclGroupEnd)."""

    stream: str
    communicator: Communicator
    transfers: tuple[Transfer, ...]
    after: tuple[int, ...] = ()


class Collective(NamedTuple):
    """One kernel of NCCL that runs on `members` ranks of a communicator."""

    stream: str
    communicator: Communicator
    members: int
    seconds: float
    label: Hashable = None
    after: tuple[int, ...] = ()


class StreamWait(NamedTuple):
    """A wait of a stream for events (cudaStreamWaitEvent) with nothing behind it to attach it to."""

    stream: str
    after: tuple[int, ...] = ()


class Record(NamedTuple):
    """An event at the present end of a stream."""

    stream: str
    timed: bool = False
    after: tuple[int, ...] = ()


class HostWait(NamedTuple):
    """The host waits for events (cudaEventSynchronize, `.cpu()`, `.item()`)."""

    after: tuple[int, ...]


class DeviceWait(NamedTuple):
    """The host waits for all that is on its device: kernel loading, cudaFree, autotuning, torch.cuda.synchronize.

    Where it `locks` the context, no other thread of the rank launches anything meanwhile.
    """

    locks: bool = True


class Pause(NamedTuple):
    """The host is busy with something else."""

    seconds: float


class Signal(NamedTuple):
    """What other hosts wait for happens `seconds` after the events: a store's key, a message by the host path. The
    calling host waits for nothing."""

    name: Hashable
    after: tuple[int, ...] = ()
    seconds: float = 0.0


class AwaitSignal(NamedTuple):
    """The host waits until that has been reported."""

    name: Hashable


class Abort(NamedTuple):
    """Kernels of a communicator end at this rank, at once and for good (ncclCommAbort); the other end's do not."""

    communicator: Communicator


Launch = Compute | Transfers | Collective | StreamWait | Record
Call = Launch | HostWait | DeviceWait | Pause | Signal | AwaitSignal | Abort
Program = list[Call]
