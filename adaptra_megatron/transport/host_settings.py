# SPDX-License-Identifier: Apache-2.0
"""Define the settings of the host path."""

from __future__ import annotations

import os
from dataclasses import dataclass

from adaptra_megatron.common.ports import PortRange

MEBIBYTE = 1 << 20


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Settings of one HostTransport; all stages of a pipeline must have the same."""

    transport: str = "auto"
    """auto: shm between stages on one host; between hosts verbs where it works, else tcp. shm, tcp, verbs: that one;
    verbs falls back to auto."""
    timeout_s: float = 600.0
    """Longest time any single message may take to get into a ring; also for the links to come up."""
    interface: str | None = None
    """Network interface whose address tcp and verbs listen on and connect from; None: see placement.listening_host."""
    port_range: PortRange | None = None
    """TCP ports that tcp, verbs and lines listen on; None: any that are free."""
    bind: str | None = None
    """The address itself, where it is the same for all stages: on one host."""
    lanes: int = 4
    """TCP connections per link; no more than either end has cores for."""
    rnics: tuple[str, ...] = ()
    """RDMA devices that verbs uses, in the order in which the other hosts' match them; none for all with a link."""
    cpus: frozenset[int] = frozenset()
    """What the delegate and the threads that copy run on: those near this stage's GPU; none for any."""
    slots: int = 16
    slot_nbytes: int = MEBIBYTE // 2
    """A ring holds slots * slot_nbytes; few enough to stay in a cache, enough for copies and wire to overlap. Each slot
    wakes a thread on both sides: smaller ones cost throughput where cores are few."""
    window_messages: int = 64
    window_nbytes: int = 256 * MEBIBYTE
    """How much a sender has on its way unacknowledged; what arrives early is kept by the receiver, up to as much."""
    max_message_nbytes: int = 4096 * MEBIBYTE
    pooled_nbytes: int = 256 * MEBIBYTE
    """Unused memory of received messages that each link keeps for the next ones."""
    grace_s: float = 10.0
    """How long a link may be down before waits for it raise an error; it is reconnected meanwhile."""
    handshake_s: float = 5.0
    """Longest time for a connection and the proof of each side."""
    is_fault_tolerant: bool = False
    """Lets a rank that is gone end its own links alone, since others go on without it."""
    stall_s: float = 30.0
    """Longest pause in the middle of a frame before its connection is given up."""
