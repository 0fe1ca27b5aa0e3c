# SPDX-License-Identifier: Apache-2.0
"""Set up the host path of a rank before it has links: its listeners, and the exchange of addresses with its peers.

The stages of a pipeline exchange addresses at the start. If that fails for one stage, all of them raise at once, and
none waits for a stage that will not come. Two ranks of different pipelines exchange addresses when they open a link.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from adaptra_megatron.common.handshake import JOB_NBYTES
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.transport.delegate.delegate_control import OpenLink
from adaptra_megatron.transport.host_settings import HostSettings, usable_cores
from adaptra_megatron.transport.lines.lines import ConnectionPlace
from adaptra_megatron.transport.setup.host_placement import (
    choose_transport,
    lacks_verbs,
    listen_shm,
    listen_tcp,
    listening_host,
    verbs_or_auto,
)
from adaptra_megatron.transport.setup.rendezvous import Rendezvous, agree_on_host_path
from adaptra_megatron.transport.wires.verbs.verbs_device import why_unavailable
from adaptra_megatron.transport.wires.wire_registry import WIRES

Address = list[str | int]

_NETWORK = "network"
"""Key of a TCP listener that other hosts reach, when there is one on loopback, too."""


@dataclass(frozen=True)
class Offer:
    """Capabilities and addresses that a rank publishes to its future peers."""

    lacks_verbs: str | None
    cores: int
    """Number of cores it may run on; more connections than cores only take turns."""
    addresses: dict[str, Address]
    """Addresses of its delegate's listeners: "shm", "tcp" (for verbs too), and perhaps _NETWORK."""
    line_addresses: dict[str, Address]
    """Addresses for control connections, likewise."""


class HostSetup:
    """Listening sockets of one rank, and the offers of its peers. Not thread-safe."""

    def __init__(self, layout: JobLayout, settings: HostSettings) -> None:
        self.listeners: dict[str, socket.socket] = {}
        """Listeners for delegates, by kind: see `Offer.addresses`."""
        self.line_listeners: dict[str, socket.socket] = {}
        self._layout, self._settings = layout, settings
        looks = settings.transport in ("auto", "verbs")
        lacking = why_unavailable(list(settings.rnics)) if looks else "it was not asked for"
        self.mine = Offer(lacking, usable_cores(), {}, {})
        self.transports: dict[int, str] = {}
        """Wire of the link to each peer, once `choose` was called for it."""
        self._offers: dict[int, Offer] = {}

    @property
    def job(self) -> bytes:
        """Identity of the job in handshakes."""
        return hashlib.sha256(self._layout.token.encode()).digest()[:JOB_NBYTES]

    def on_offer(self, peer: int, offer: Offer) -> None:
        """Keep a peer's offer, replacing an earlier one."""
        self._offers[peer] = offer

    def listen_for(self, wanted: set[str], ranks: Sequence[int]) -> list[str]:
        """Open the listeners ("shm", "tcp") for links between `ranks`, including this one; return the new ones.

        Raises TransportError, OSError; listeners opened before the error stay.
        """
        one_host, made = self._layout.share_network(ranks), []
        if "shm" in wanted and "shm" not in self.listeners:
            self._add("shm", None)
            made.append("shm")
        # Ranks of one host reach any TCP listener of it, those of other hosts only one on a network.
        if "tcp" in wanted and not (one_host and "tcp" in self.listeners):
            bind = self._settings.bind
            host = bind if bind is not None else listening_host(self._settings.interface, one_host=one_host)
            if all(address[0] != host for address in self.mine.addresses.values()):
                made.append(_NETWORK if "tcp" in self.listeners else "tcp")
                self._add(made[-1], host)
        return made

    def listeners_for(self, peer: int) -> set[str]:
        """Return the kinds of listeners that a link to `peer` may need, before its offer is known."""
        wanted, workers = self._settings.transport, self._layout.workers
        if workers[self._layout.rank].identity != workers[peer].identity:
            return {"tcp"}
        return {"auto": {"shm"}, "verbs": {"shm", "tcp"}}.get(wanted) or {WIRES[wanted].listener}

    def choose(self, peer: int) -> str:
        """Return the wire of the link to a peer whose offer is known. Raises TransportError if the requested wire is
        impossible.
        """
        wanted, rank, workers = self._settings.transport, self._layout.rank, self._layout.workers
        lacking = {rank: self.mine.lacks_verbs, peer: self._offers[peer].lacks_verbs}
        # Both ends decide alike: each has both offers.
        if wanted == "verbs":
            wanted = verbs_or_auto(lacking, rank, peer)
        ends = workers[rank].identity, workers[peer].identity, f"{rank}<->{peer}"
        self.transports[peer] = choose_transport(wanted, *ends, without_verbs=lacks_verbs(lacking, rank, peer))
        return self.transports[peer]

    def place(self, peer: int) -> ConnectionPlace:
        """Return the address of the control connection to `peer`."""
        listener = WIRES[self.transports[peer]].listener
        return ConnectionPlace(
            self._reached(peer, listener, self._offers[peer].line_addresses), self._source(peer, listener)
        )

    def request(self, peer: int, opening: int = 1) -> OpenLink:
        """Return the delegate's request for the link to `peer`."""
        transport = self.transports[peer]
        listener, offer = WIRES[transport].listener, self._offers[peer]
        return OpenLink(
            peer=peer,
            session=0,
            transport=transport,
            # One end connects, and both know which.
            connects=self._layout.rank < peer,
            address=self._reached(peer, listener, offer.addresses),
            source=self._source(peer, listener),
            lanes=WIRES[transport].lanes or min(self._settings.lanes, self.mine.cores, offer.cores),
            opening=opening,
        )

    def close(self) -> None:
        """Close the listeners."""
        for listener in (*self.listeners.values(), *self.line_listeners.values()):
            listener.close()

    def _add(self, kind: str, host: str | None) -> None:
        for listeners, addresses in (
            (self.listeners, self.mine.addresses),
            (self.line_listeners, self.mine.line_addresses),
        ):
            listeners[kind], addresses[kind] = (
                listen_shm() if host is None else listen_tcp(host, self._settings.port_range)
            )

    def _reached(self, peer: int, listener: str, addresses: dict[str, Address]) -> Address:
        one_host = self._layout.share_network([self._layout.rank, peer])
        return addresses[listener if one_host or listener != "tcp" or _NETWORK not in addresses else _NETWORK]

    def _source(self, peer: int, listener: str) -> str:
        return str(self._reached(peer, listener, self.mine.addresses)[0]) if listener == "tcp" else ""


def meet(rendezvous: Rendezvous, peers: Sequence[int], settings: HostSettings) -> HostSetup:
    """Open listeners and exchange offers. All stages of the pipeline call this at the same point, each with its peers.

    If any stage cannot listen, or cannot be connected to a peer as `settings` require, all stages raise TransportError,
    which names those ranks and the causes. The caller owns the listeners.
    """
    setup = HostSetup(rendezvous.layout, settings)
    # Twice: what both ends can do decides on the wires, these on the listeners, and the listeners have addresses.
    _exchange_offers(setup, rendezvous, "hosts")
    failure: Exception | None = None
    try:
        setup.listen_for({WIRES[setup.choose(peer)].listener for peer in peers}, rendezvous.ranks)
    except Exception as cause:  # whatever it is, the others are to know
        failure = cause
    try:
        _exchange_offers(setup, rendezvous, "addresses")
        agree_on_host_path(rendezvous, "listening", failure)
    except BaseException:
        setup.close()
        raise
    return setup


def _exchange_offers(setup: HostSetup, rendezvous: Rendezvous, what: str) -> None:
    for rank, offer in zip(rendezvous.ranks, rendezvous.gather(what, asdict(setup.mine)), strict=True):
        setup.on_offer(rank, Offer(**offer))
