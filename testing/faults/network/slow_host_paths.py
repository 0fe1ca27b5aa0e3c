# SPDX-License-Identifier: Apache-2.0
"""Slow host paths: a decorator gives chosen links a ring that delivers everything late.

Everything that a stage sends on the host path (messages, notes about the device path, acknowledgements) leaves through
one ring, which a DualLink gets with every session. Each rank delays its own messages.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_link.host_link_state import GiveUp
from adaptra_megatron.transport.link_paths import Path
from testing.faults.network.link_faults import LinkClock, LinkFault
from testing.faults.network.slow_ring import SlowRing
from testing.replacing import Replaced, Replacement

Link = tuple[int, int]
"""(source stage, target stage)."""


class _SlowEnd:
    """Host path of one directed link at its sender, over the rings of all its sessions."""

    def __init__(self, link: Link, name: str, faults: Sequence[LinkFault]) -> None:
        self.link, self.struck = link, 0
        self._name, self._faults = name, faults
        self._clock = LinkClock(f"{faults[0].seed}:{name}:host")
        self._lock = threading.Lock()
        self._iteration = 0
        self._healed = False
        self._ring: SlowRing | None = None

    @property
    def late(self) -> int:
        """Number of delayed messages so far."""
        return self._clock.late

    def slow(self, ring: Ring) -> SlowRing:
        """Decorate the `ring` of a new session."""
        if self._ring is not None:
            self._ring.retire()
        self._ring = SlowRing(ring, self._name, self._due_s)
        return self._ring

    def set_iteration(self, iteration: int) -> None:
        self._iteration = iteration

    def heal(self) -> None:
        """End the delay. Messages in flight arrive when due; later ones are not delayed, but arrive after those."""
        self._healed = True

    def _due_s(self, nbytes: int | None) -> float:
        fault = None
        if not self._healed:
            fault = next((fault for fault in self._faults if fault.strikes(self._iteration)), None)
        with self._lock:
            if fault is not None and nbytes is None:
                fault = fault.of_acknowledgements()
            elif fault is not None:
                self.struck += 1
            return self._clock.arrival_s(time.monotonic(), nbytes or 0, fault)


class SlowHostPaths:
    """Delays `faults` on the host paths of transports made between `install()` and `close()`."""

    def __init__(self, faults: Sequence[LinkFault], stage_of_rank: Callable[[int], int] = lambda rank: rank) -> None:
        """`stage_of_rank`: pipeline stage of a global rank; the identity to name ranks in the faults instead."""
        self._faults = [fault for fault in faults if Path.HOST in fault.paths]
        self._stage_of_rank = stage_of_rank
        self._ends: list[_SlowEnd] = []
        self._iteration = 0
        self._replaced: Replaced | None = None

    @property
    def struck(self) -> dict[Link, int]:
        """Number of messages (and notes) that this rank has delayed, by link."""
        counts: dict[Link, int] = {}
        for end in self._ends:
            if end.struck:
                counts[end.link] = counts.get(end.link, 0) + end.struck
        return counts

    @property
    def late(self) -> int:
        """Number of this rank's messages that were delayed."""
        return sum(end.late for end in self._ends)

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0): later messages of this rank belong to it."""
        self._iteration = iteration
        for end in self._ends:
            end.set_iteration(iteration)

    def install(self) -> None:
        """Decorate the creation of host links. torch.distributed must be initialised."""
        if self._replaced is None and self._faults:
            make_link = self._decorate(HostTransport._make_link)
            reason = "emulated slow link, host path"
            self._replaced = Replaced([Replacement(HostTransport, "_make_link", make_link, reason)])

    def close(self) -> None:
        """Remove the decorator: later messages are not delayed."""
        if self._replaced is not None:
            self._replaced.undo()
            self._replaced = None
        for end in self._ends:
            end.heal()

    def _decorate(self, make_link: Callable[..., DualLink]) -> Callable[..., DualLink]:
        @functools.wraps(make_link)
        def make_slow_link(transport: HostTransport, peer: int, *settings: Any) -> DualLink:
            link = make_link(transport, peer, *settings)
            self._slow_down(link, transport.rank, peer)
            return link

        return make_slow_link

    def _slow_down(self, link: DualLink, source: int, target: int) -> None:
        ends = (self._stage_of_rank(source), self._stage_of_rank(target))
        faults = [fault for fault in self._faults if (fault.source, fault.target) == ends]
        if not faults:
            return
        end = _SlowEnd(ends, f"{source}>{target}", faults)
        end.set_iteration(self._iteration)
        self._ends.append(end)
        connected = link.connected

        def connected_slowly(outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
            connected(end.slow(outbound), inbound, give_up)  # type: ignore[arg-type]

        link.connected = connected_slowly  # type: ignore[method-assign]
