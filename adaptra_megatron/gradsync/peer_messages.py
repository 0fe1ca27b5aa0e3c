# SPDX-License-Identifier: Apache-2.0
"""Exchange parts of gradients between replicas, one message each way at a time, over a process group of their own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import epoch_group, nccl_group

_ACCUSED = "accused"
_STORE_S = 5.0
"""Time limit of the store's answers after everything else has failed."""
_TRACED_S = 3.0
"""Longest wait for accused ranks to accuse others: timeouts of waits that began together differ by less."""
_POLL_S = 20e-6
_TAG = 0
"""Tag of all messages. NCCL has none: messages of a pair arrive in the order in which they are sent."""


class PeerError(RuntimeError):
    """A replica failed during a gradient synchronisation; names it, the observation and the remedy."""


class PeerMessage(NamedTuple):
    """One direction of an exchange."""

    tensor: torch.Tensor
    """Contiguous, of any type and at least one element."""
    peer: int
    """Index in the group."""


class PeerExchange(Protocol):
    """Interface of a group's messages: `Peers`, or a wrapper around it."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def index(self) -> int:
        """Index of this process in the group."""

    def begin(self, sends: PeerMessage | None, receives: PeerMessage | None) -> Begun:
        """Begin to send to one member and to receive from one member. Raises PeerError."""


class Begun(NamedTuple):
    """An exchange in progress, with a wait for each direction; None if there is no message, or the host need
    not wait.
    """

    sent: Callable[[], None] | None
    """Waits until the sent tensor may be changed. Raises PeerError."""
    received: Callable[[], None] | None
    """Waits until the message has arrived. Raises PeerError."""


class Peers:
    """One process's end of a private group. For one thread at a time.

    After an error no member can use the group: connections are closed, which wakes members that wait for this one at
    once. Each member's error names the rank at the end of the chain of waits.
    """

    def __init__(self, backend: Any, store: Any, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """`backend`: torch's ProcessGroupGloo or ProcessGroupNCCL of `ranks` (global ranks), for this object alone.

        `store`: in which members publish which rank they wait for. `timeout_s`: longest wait for an exchange; a
        straggler may take that long.
        """
        self._backend, self._store, self._ranks, self._rank = backend, store, tuple(ranks), rank
        self._timeout_s = timeout_s
        self._standing: deque[tuple[Sequence[int], Any]] = deque()
        """Pending operations in streams, with the members that take part."""
        self._keys = itertools.count()
        self._works: dict[int, Any] = {}
        """Messages in progress for which the host waits."""

    @classmethod
    def meet(
        cls, control: ControlStore, name: str, ranks: Sequence[int], rank: int, timeout_s: float, device: torch.device
    ) -> Peers:
        """Create a group for tensors on `device`; all of `ranks` call this at about the same time.

        `name`: of the synchronisation. Raises PeerError if a rank does not come within `timeout_s`.
        """
        place = f"gradients/{name}/{hashlib.sha256(str(list(ranks)).encode()).hexdigest()[:24]}"
        try:
            if device.type == "cpu":
                backend = epoch_group(control, place, ranks, rank, timeout_s)
            else:
                # torch's watchdog would end the process before the error that names a rank.
                backend = nccl_group(control.unsealed(place), ranks.index(rank), len(ranks), 2 * timeout_s)
            # Groups of NCCL connect in their first operation, in which all members must take part.
            backend.allreduce([torch.zeros(1, device=device)]).wait(timedelta(seconds=timeout_s))
        except RuntimeError as cause:
            raise PeerError(
                f"rank {rank}: ranks {list(ranks)} did not all come to synchronise gradients within {timeout_s:g} s "
                f"({_brief(cause)}): look into the log of the one that is missing"
            ) from cause
        store = control.unsealed(f"{place}/error")
        store.set_timeout(timedelta(seconds=_STORE_S))
        return cls(backend, store, ranks, rank, timeout_s)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._ranks)

    @property
    def index(self) -> int:
        """This process's index in the group."""
        return self._ranks.index(self._rank)

    def exchange(self, sends: PeerMessage | None, receives: PeerMessage | None) -> None:
        """Send and receive at the same time: neither waits for the other, on either end.

        Returns when both are complete; with NCCL, when both are in the current stream's queue. Raises PeerError if a
        peer has failed, or does not come within the timeout.
        """
        for wait in self.begin(sends, receives):
            if wait is not None:
                wait()

    def begin(self, sends: PeerMessage | None, receives: PeerMessage | None) -> Begun:
        """Begin an exchange. Messages between two members arrive in the order in which they were begun.

        With NCCL the current stream waits for both directions, and the host for none.
        """
        self._require_backend()
        peers = [message.peer for message in (receives, sends) if message is not None]
        try:
            keys = self._launch(sends, receives, peers)
        except RuntimeError as cause:
            raise self._broken(peers, cause) from cause
        if not keys:
            return Begun(None, None)
        waits = [functools.partial(self._wait, *each) for each in zip(peers, keys, strict=True)]
        return Begun(waits[-1] if sends is not None else None, waits[0] if receives is not None else None)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum over all members, with the library's own algorithm. Raises PeerError."""
        self._collective(lambda backend: backend.allreduce([values]))

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the `values` of each member, of the same shape, by index, ready for the host. Raises PeerError."""
        found = [torch.empty_like(values) for _ in self._ranks]
        self._collective(lambda backend: backend.allgather([found], [values]))
        self.settle()
        return found

    def settle(self) -> None:
        """Wait for all work in streams. Raises PeerError if no part of it has ended within the timeout."""
        moved_s = time.monotonic()
        while self._standing:
            peers, work = self._standing[0]
            try:
                ended = work.is_completed()
                if not ended and time.monotonic() - moved_s > self._timeout_s:
                    raise RuntimeError("Timed out")
            except RuntimeError as cause:
                self._standing.clear()
                raise self._broken(peers, cause) from cause
            if ended:
                self._standing.popleft()
                moved_s = time.monotonic()
            else:
                time.sleep(_POLL_S)

    def _enqueued(self, peers: Sequence[int], work: Any) -> None:
        """Make the current stream wait. With a timeout torch's WorkNCCL.wait would block this thread, polling each
        millisecond.
        """
        work.wait()
        self._standing.append((tuple(peers), work))

    def _collective(self, launch: Callable[[Any], Any]) -> None:
        self._require_backend()
        others = [peer for peer in range(self.size) if peer != self.index]
        try:
            work = launch(self._backend)
            if self._backend.supports_coalescing:
                self._enqueued(others, work)
            else:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as cause:
            raise self._broken(others, cause) from cause

    def _require_backend(self) -> None:
        if self._backend is None:
            raise PeerError(f"rank {self._rank}: gradients cannot be synchronised any more: an exchange has failed")

    def _broken(self, missed: Sequence[int], cause: BaseException) -> PeerError:
        mine = frozenset(self._ranks[peer] for peer in missed)
        with contextlib.suppress(RuntimeError):  # the job's store is gone, too
            self._store.set(f"{_ACCUSED}/{self._rank}", ",".join(map(str, mine)))
        # Connections are closed with the last reference to the group, which frames of the error have, too. Members
        # that wait for this one wake, and say whom they miss.
        self._backend = None
        self._works.clear()
        traceback.clear_frames(cause.__traceback__)
        return self._error(mine, cause)

    def _launch(self, sends: PeerMessage | None, receives: PeerMessage | None, peers: Sequence[int]) -> list[int]:
        """Return the keys in `_works` of the receive and the send; an empty list for work in a stream."""
        backend = self._backend
        operations = [
            (launch, message)
            for launch, message in ((backend.recv, receives), (backend.send, sends))
            if message is not None
        ]
        if backend.supports_coalescing:
            # Two operations of NCCL that are launched apart would wait for each other.
            backend._start_coalescing()
            for launch, message in operations:
                launch([message.tensor], message.peer, _TAG)
            self._enqueued(peers, backend._end_coalescing())
            return []
        keys = []
        for launch, message in operations:
            keys.append(next(self._keys))
            self._works[keys[-1]] = launch([message.tensor], message.peer, _TAG)
        return keys

    def _wait(self, peer: int, key: int) -> None:
        self._require_backend()
        try:
            self._works.pop(key).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as cause:
            raise self._broken([peer], cause) from cause

    def _error(self, mine: frozenset[int], cause: BaseException) -> PeerError:
        accusers = {self._rank: mine}
        with contextlib.suppress(RuntimeError):
            self._trace(accusers)
        silent = _silent(accusers) or mine
        witness = min(rank for rank, accused in accusers.items() if accused & silent)
        seen = "" if self._rank == witness else f", as rank {witness} has seen"
        return PeerError(
            f"rank {self._rank}: gradients cannot be synchronised: rank {' or rank '.join(map(str, sorted(silent)))} "
            f"has died or did not answer within {self._timeout_s:g} s{seen} ({_brief(cause)}); look into its log and "
            "restart from the last checkpoint"
        )

    def _trace(self, accusers: dict[int, frozenset[int]]) -> None:
        """Follow the chain of waits: add the ranks that each accused rank accuses itself.

        A rank further up the chain may reach its timeout first, so accused ranks get _TRACED_S to accuse others. Raises
        RuntimeError if the store does not answer.
        """
        until_s = time.monotonic() + _TRACED_S
        while (silent := _silent(accusers)) and time.monotonic() < until_s:
            for rank in silent:
                if self._store.check([f"{_ACCUSED}/{rank}"]):
                    said = self._store.get(f"{_ACCUSED}/{rank}").decode()
                    accusers[rank] = frozenset(map(int, said.split(",")))
            time.sleep(0.05)


def _silent(accusers: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Return the accused ranks that accuse no other."""
    return frozenset().union(*accusers.values()).difference(accusers)


def _brief(cause: BaseException) -> str:
    return str(cause).strip().partition("\n")[0]
