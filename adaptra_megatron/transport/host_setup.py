# SPDX-License-Identifier: Apache-2.0
"""How the stages of a pipeline meet: they say where they are, agree on what joins each two, and begin to listen.

Whatever keeps one stage from that is an error on all of them, at once: no stage waits for one that will not come.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from adaptra_megatron.transport.control import Open
from adaptra_megatron.transport.handshake import PIPELINE_NBYTES
from adaptra_megatron.transport.host_settings import HostSettings, usable_cores
from adaptra_megatron.transport.lines import Place
from adaptra_megatron.transport.placement import (
    agree_on_host_path,
    choose_transport,
    host_identity,
    lacks_verbs,
    listen_shm,
    listen_tcp,
    listening_host,
    verbs_or_auto,
)
from adaptra_megatron.transport.rendezvous import Rendezvous
from adaptra_megatron.transport.shm_wire import LANES as SHM_LANES
from adaptra_megatron.transport.verbs_device import why_unavailable

Address = list[str | int]


@dataclass(frozen=True)
class Meeting:
    """What one stage knows after all have met."""

    stage: int
    pipeline: str
    """Names it within the job, in hexadecimal digits."""
    transports: dict[int, str]
    """By peer: shm, tcp or verbs."""
    listeners: dict[str, socket.socket]
    """Of this stage: "shm" and "tcp" (for verbs too), as far as its links need them."""
    addresses: Sequence[dict[str, Address]]
    """By stage: where its listeners are."""
    line_listeners: dict[str, socket.socket]
    """As `listeners`, for lines."""
    line_addresses: Sequence[dict[str, Address]]
    cores: Sequence[int]
    """By stage: what it may run on. More connections than that only take turns."""

    def place(self, peer: int) -> Place:
        """Where the line to `peer` leads."""
        listener = _listener_of(self.transports[peer])
        return Place(self.line_addresses[peer][listener], self._source(listener))

    def request(self, peer: int, settings: HostSettings) -> Open:
        """What to ask a delegate for, for the link to `peer`."""
        transport = self.transports[peer]
        listener = _listener_of(transport)
        return Open(
            peer=peer,
            session=0,
            transport=transport,
            connects=self.stage < peer,
            address=self.addresses[peer][listener],
            source=self._source(listener),
            lanes=SHM_LANES if transport == "shm" else min(settings.lanes, self.cores[self.stage], self.cores[peer]),
        )

    def close(self) -> None:
        """Stop listening."""
        _close(self.listeners, self.line_listeners)

    def _source(self, listener: str) -> str:
        return str(self.addresses[self.stage]["tcp"][0]) if listener == "tcp" else ""


@dataclass(frozen=True)
class _Host:
    """What a stage says first."""

    identity: str
    token: str
    lacks_verbs: str | None
    cores: int


def meet(rendezvous: Rendezvous, peers: Sequence[int], settings: HostSettings) -> Meeting:
    """Called by all stages of the pipeline at the same point; the listeners are the caller's.

    Raises TransportError on all of them if any cannot listen, or cannot be joined to a peer as `settings` ask for;
    it names those ranks and what keeps each.
    """
    stage = rendezvous.stage
    looks = settings.transport in ("auto", "verbs")
    lacking = why_unavailable(list(settings.rnics)) if looks else "it was not asked for"
    mine = _Host(host_identity(), secrets.token_hex(PIPELINE_NBYTES), lacking, usable_cores())
    hosts = [_Host(**told) for told in rendezvous.gather("places", asdict(mine))]
    transports: dict[int, str] = {}
    listeners: tuple[dict[str, socket.socket], ...] = ({}, {})
    """For delegates, and for lines."""
    addresses: tuple[dict[str, Address], ...] = ({}, {})
    failure: Exception | None = None
    try:
        transports |= {peer: _choose(hosts, stage, peer, settings.transport) for peer in peers}
        for both in zip(listeners, addresses, strict=True):
            _listen(set(transports.values()), _one_host(hosts), settings, *both)
    except Exception as cause:  # whatever it is, the others are to know
        failure = cause
    try:
        offered = rendezvous.gather("addresses", addresses)
        agree_on_host_path(rendezvous, "listening", failure)
    except BaseException:
        _close(*listeners)
        raise
    for_delegates, for_lines = listeners
    of_delegates, of_lines = zip(*offered, strict=True)
    cores = [host.cores for host in hosts]
    return Meeting(stage, hosts[0].token, transports, for_delegates, of_delegates, for_lines, of_lines, cores)


def _choose(hosts: Sequence[_Host], stage: int, peer: int, wanted: str) -> str:
    """Raises TransportError if the link cannot be as wanted."""
    lacking = {end: hosts[end].lacks_verbs for end in (stage, peer)}
    if wanted == "verbs":
        wanted = verbs_or_auto(lacking, stage, peer)
    ends = hosts[stage].identity, hosts[peer].identity, f"{stage}<->{peer}"
    return choose_transport(wanted, *ends, without_verbs=lacks_verbs(lacking, stage, peer))


def _one_host(hosts: Sequence[_Host]) -> bool:
    return len({host.identity.partition("/")[0] for host in hosts}) == 1


def _listen(
    transports: set[str],
    one_host: bool,
    settings: HostSettings,
    listeners: dict[str, socket.socket],
    addresses: dict[str, Address],
) -> None:
    """Add what the transports need; what was added before an error stays there. Raises TransportError, OSError."""
    if "shm" in transports:
        listeners["shm"], addresses["shm"] = listen_shm()
    if transports & {"tcp", "verbs"}:
        host = settings.bind if settings.bind is not None else listening_host(settings.interface, one_host=one_host)
        listeners["tcp"], addresses["tcp"] = listen_tcp(host)


def _listener_of(transport: str) -> str:
    return "shm" if transport == "shm" else "tcp"


def _close(*listeners: dict[str, socket.socket]) -> None:
    for listener in (listener for some in listeners for listener in some.values()):
        listener.close()
