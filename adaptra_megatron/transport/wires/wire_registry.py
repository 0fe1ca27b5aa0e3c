# SPDX-License-Identifier: Apache-2.0
"""All wires, by the names that --adaptra-host-transport has for them. A new one is a module, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.wires import shm_wire as shm
from adaptra_megatron.transport.wires import tcp_wire as tcp
from adaptra_megatron.transport.wires.verbs import verbs_wire as verbs
from adaptra_megatron.transport.wires.wire import Wire


class WireRequest(NamedTuple):
    """Parameters that a session is made from, in the delegate."""

    rings: Sequence[Ring]
    """The training process's: the outbound one, and the inbound one unless the peer's is shared."""
    connects: bool
    """Set if this end has made the connections."""
    devices: list[str]
    """RDMA devices to use; none for all with a link."""
    handshake_s: float
    stall_s: float
    max_message_nbytes: int


@dataclass(frozen=True, kw_only=True)
class WireKind:
    """One wire, for all that set links up."""

    make: Callable[[WireRequest], Wire]
    listener: str
    """What its connections come by: "shm" (unix sockets of one host) or "tcp"."""
    lanes: int | None = None
    """Connections of a session; None: as many as are asked for."""
    shares_rings: bool = False
    """Set if each training process reads the other's outbound ring."""
    slot_nbytes: int = 0
    """Least size of a ring's slot."""
    one_network: bool = True
    """Set if it goes where the connections between training processes go, and breaks with these."""
    falls_back_to: str | None = None
    """Wire of the next session, once several in a row have not begun."""


def _shm(request: WireRequest) -> Wire:
    return shm.ShmWire(request.rings[0], request.handshake_s)


def _tcp(request: WireRequest) -> Wire:
    outbound, inbound = request.rings
    return tcp.TcpWire(outbound, inbound, max_message_nbytes=request.max_message_nbytes, stall_s=request.stall_s)


def _verbs(request: WireRequest) -> Wire:
    outbound, inbound = request.rings
    return verbs.VerbsWire(
        outbound, inbound, connects=request.connects, devices=request.devices, timeout_s=request.handshake_s
    )


WIRES: Mapping[str, WireKind] = {
    "shm": WireKind(make=_shm, listener="shm", lanes=shm.LANES, shares_rings=True),
    "tcp": WireKind(make=_tcp, listener="tcp"),
    "verbs": WireKind(
        make=_verbs,
        listener="tcp",
        lanes=verbs.LANES,
        slot_nbytes=verbs.SLOT_NBYTES,
        one_network=False,
        falls_back_to="tcp",
    ),
}
"""In the order in which a handshake numbers them."""
