# SPDX-License-Identifier: Apache-2.0
"""Define the settings of the host path."""

from __future__ import annotations

import os
from dataclasses import dataclass

from adaptra_megatron.common.ports import PortRange

MEBIBYTE = 1 << 20


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Settings of one HostTransport; all stages of a pipeline must have the same."""

    transport: str = "auto"
    """auto: shm within a host; between hosts verbs where it works, else tcp. shm, tcp: always that one. verbs: verbs
    where it works, else as auto."""
    timeout_s: float = 600.0
    """Longest time for a message to get into a ring, and for links to come up, in seconds."""
    interface: str | None = None
    """Network interface for tcp and verbs to listen on and connect from; None: see `host_placement.listening_host`."""
    port_range: PortRange | None = None
    """TCP ports for tcp, verbs and control connections to listen on; None: any free ones."""
    bind: str | None = None
    """Address to listen on, if it is the same for all stages: on one host."""
    lanes: int = 4
    """TCP connections per link; no more than either end has cores for."""
    rnics: tuple[str, ...] = ()
    """RDMA devices for verbs; the n-th of two hosts connect to each other. Empty: all with an active port."""
    cpus: frozenset[int] = frozenset()
    """CPUs for the delegate and the copying threads: those near this stage's GPU; empty: any."""
    slots: int = 16
    slot_nbytes: int = MEBIBYTE // 2
    """Bytes of a slot; the ring holds slots * slot_nbytes. The ring should fit into a cache. Slots should be small
    enough for copies and wire to overlap, but each slot wakes a thread at both ends: small ones cost throughput on few
    cores.
    """
    window_messages: int = 64
    window_nbytes: int = 256 * MEBIBYTE
    """Maximum unacknowledged bytes of a sender. The receiver keeps up to as much that arrives before its receive."""
    max_message_nbytes: int = 4096 * MEBIBYTE
    pooled_nbytes: int = 256 * MEBIBYTE
    """Bytes of unused memory of received messages that each link keeps for the next ones."""
    grace_s: float = 10.0
    """How long a link may be down, while reconnecting, before waits for it fail."""
    handshake_s: float = 5.0
    """Longest time for a connection and its authentication."""
    is_fault_tolerant: bool = False
    """True: a failed rank ends its own links alone, since the others continue without it."""
    stall_s: float = 30.0
    """Longest pause in the middle of a frame before its connection is given up."""
