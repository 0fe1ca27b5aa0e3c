# SPDX-License-Identifier: Apache-2.0
"""How the stages of a pipeline meet: they say where they are, agree on what joins each two, and begin to listen.

Whatever keeps one stage from that is an error on all of them, at once: no stage waits for one that will not come.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from adaptra_megatron.transport.control import Open
from adaptra_megatron.transport.handshake import PIPELINE_NBYTES
from adaptra_megatron.transport.host_settings import HostSettings, usable_cores
from adaptra_megatron.transport.messages import TransportError
from adaptra_megatron.transport.placement import (
    choose_transport,
    host_identity,
    lacks_verbs,
    listen_shm,
    listen_tcp,
    listening_host,
    verbs_or_auto,
)
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
    cores: Sequence[int]
    """By stage: what it may run on. More connections than that only take turns."""

    def request(self, peer: int, settings: HostSettings) -> Open:
        """What to ask a delegate for, for the link to `peer`."""
        transport = self.transports[peer]
        listener = "shm" if transport == "shm" else "tcp"
        return Open(
            peer=peer,
            session=0,
            transport=transport,
            connects=self.stage < peer,
            address=self.addresses[peer][listener],
            source=str(self.addresses[self.stage]["tcp"][0]) if listener == "tcp" else "",
            lanes=SHM_LANES if transport == "shm" else min(settings.lanes, self.cores[self.stage], self.cores[peer]),
        )

    def close(self) -> None:
        """Stop listening."""
        _close(self.listeners)


@dataclass(frozen=True)
class _Host:
    """What a stage says first."""

    identity: str
    name: str
    token: str
    lacks_verbs: str | None
    cores: int


def meet(group: dist.ProcessGroup, peers: Sequence[int], settings: HostSettings) -> Meeting:
    """Called by all ranks of the pipeline's process group at the same point; the listeners are the caller's.

    Raises TransportError on all of them if any cannot listen, or cannot be joined to a peer as `settings` ask for;
    it names those ranks and what keeps each.
    """
    stage = group.rank()
    looks = settings.transport in ("auto", "verbs")
    lacking = why_unavailable(list(settings.rnics)) if looks else "it was not asked for"
    mine = _Host(host_identity(), socket.gethostname(), secrets.token_hex(PIPELINE_NBYTES), lacking, usable_cores())
    hosts: list[_Host] = _gather(group, mine)
    transports: dict[int, str] = {}
    listeners: dict[str, socket.socket] = {}
    addresses: dict[str, Address] = {}
    failure: Exception | None = None
    try:
        transports |= {peer: _choose(hosts, stage, peer, settings.transport) for peer in peers}
        _listen(set(transports.values()), _one_host(hosts), settings, listeners, addresses)
    except Exception as cause:  # whatever it is, the others are to know
        failure = cause
    try:
        said = None if failure is None else _spelled(failure)
        offers: list[tuple[dict[str, Address], str | None]] = _gather(group, (addresses, said))
        causes = {stage: cause for stage, (_addresses, cause) in enumerate(offers) if cause is not None}
        if causes:
            raise _error(group, hosts, causes) from failure
    except BaseException:
        _close(listeners)
        raise
    addresses_of, cores = [offer[0] for offer in offers], [host.cores for host in hosts]
    return Meeting(stage, hosts[0].token, transports, listeners, addresses_of, cores)


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


def _close(listeners: dict[str, socket.socket]) -> None:
    for listener in listeners.values():
        listener.close()


def _spelled(failure: Exception) -> str:
    return str(failure) if isinstance(failure, TransportError) else f"{type(failure).__name__}: {failure}"


def _error(group: dist.ProcessGroup, hosts: Sequence[_Host], causes: dict[int, str]) -> TransportError:
    """One for all ranks: stages with the same cause are named together."""
    stages_by_cause: dict[str, list[int]] = {}
    for stage, cause in causes.items():
        stages_by_cause.setdefault(cause, []).append(stage)
    parts = []
    for cause, stages in stages_by_cause.items():
        who = [f"rank {dist.get_global_rank(group, stage)} (stage {stage} on {hosts[stage].name})" for stage in stages]
        parts.append(f"{', '.join(who)}: {cause}")
    return TransportError(
        f"the host path cannot be set up: {'; '.join(parts)}; --adaptra-host-transport off runs without the host path"
    )


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
