# SPDX-License-Identifier: Apache-2.0
"""List all wires, by their names in --adaptra-host-transport. A new one is a module, and a row here.

The delegate, which creates sessions, imports the module; training processes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.wires.wire import Wire


class WireRequest(NamedTuple):
    """Parameters of a session, in the delegate."""

    rings: Sequence[Ring]
    """Rings of the training process: the outbound one, and the inbound one unless the peer's is shared."""
    connects: bool
    """True if this end has made the connections."""
    devices: list[str]
    """RDMA devices to use; none for all with a link."""
    handshake_s: float
    stall_s: float
    max_message_nbytes: int


@dataclass(frozen=True, kw_only=True)
class WireKind:
    """Properties of one wire."""

    make: Callable[[WireRequest], Wire]
    listener: str
    """Kind of listener for its connections: "shm" (unix sockets of one host) or "tcp"."""
    lanes: int | None = None
    """Number of connections of a session; None: as requested."""
    shares_rings: bool = False
    """True if each training process reads the other's outbound ring."""
    slot_nbytes: int = 0
    """Least slot size of its rings, in bytes."""
    one_network: bool = True
    """True if it uses the network of the control connections, and fails with it."""
    falls_back_to: str | None = None
    """Wire of later sessions after several successive ones did not begin; None: none."""


def _shm(request: WireRequest) -> Wire:
    from adaptra_megatron.transport.wires.shm_wire import ShmWire

    return ShmWire(request.rings[0], request.handshake_s)


def _tcp(request: WireRequest) -> Wire:
    from adaptra_megatron.transport.wires.tcp_wire import TcpWire

    outbound, inbound = request.rings
    return TcpWire(outbound, inbound, max_message_nbytes=request.max_message_nbytes, stall_s=request.stall_s)


def _verbs(request: WireRequest) -> Wire:
    from adaptra_megatron.transport.wires.verbs.verbs_wire import VerbsWire

    outbound, inbound = request.rings
    return VerbsWire(
        outbound, inbound, connects=request.connects, devices=request.devices, timeout_s=request.handshake_s
    )


WIRES: Mapping[str, WireKind] = {
    "shm": WireKind(make=_shm, listener="shm", lanes=1, shares_rings=True),
    "tcp": WireKind(make=_tcp, listener="tcp"),
    "verbs": WireKind(
        make=_verbs,
        listener="tcp",
        lanes=1,
        slot_nbytes=1 << 20,  # what Python does for each slot, at both ends, takes as long as a large copy
        one_network=False,
        falls_back_to="tcp",
    ),
}
"""Wires by name, in the order in which handshakes number them."""
