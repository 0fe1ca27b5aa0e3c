# SPDX-License-Identifier: Apache-2.0
"""Choose the wire between two ranks from their hosts, and the addresses that their delegates listen on."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.ports import BACKLOG, PortRange, bound_within
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.interfaces import InterfaceError, interface_address

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
logger = logger_of(__name__)


def verbs_or_auto(lacking: Mapping[int, str | None], rank: int, peer: int) -> str:
    """Return "verbs" for a link that should use it, or "auto" if one of its two ranks cannot.

    `lacking`: why each rank cannot use verbs; None: it can. Both ends of a link get the same result.
    """
    cause = lacks_verbs(lacking, rank, peer)
    if cause is not None:
        logger.warning("link %d<->%d: no verbs, %s; falling back to auto", rank, peer, cause)
    return "verbs" if cause is None else "auto"


def lacks_verbs(lacking: Mapping[int, str | None], rank: int, peer: int) -> str | None:
    """Return why the link between two ranks cannot use verbs; None if it can. Both ends get the same result."""
    causes = [f"rank {end}: {cause}" for end in sorted((rank, peer)) if (cause := lacking[end]) is not None]
    return "; ".join(causes) or None


def choose_transport(
    wanted: str, ours: str, theirs: str, link: str, without_verbs: str | None = "no RDMA device was looked for"
) -> str:
    """Return the wire between ranks with the host identities `ours` and `theirs`: "shm", "tcp" or "verbs".

    `without_verbs`: why the link cannot use verbs; None: auto chooses verbs between hosts. If the RDMA devices of two
    hosts cannot reach each other, link_session falls back to tcp. Raises TransportError if shm is forced between hosts.
    """
    if wanted == "auto":
        if ours == theirs:
            # Containers of one host with networks of their own have different identities: see host_identity.
            return "shm"
        if without_verbs is not None:
            logger.info("link %s: tcp, not verbs: %s", link, without_verbs)
        return "verbs" if without_verbs is None else "tcp"
    if wanted == "shm" and ours != theirs:
        raise TransportError(
            f"link {link}: shared memory was asked for, but its ranks are on different hosts (or in containers with "
            f"networks of their own): {ours} and {theirs}; use --adaptra-host-transport auto or tcp"
        )
    return wanted


def listen_shm() -> tuple[socket.socket, list[str | int]]:
    """Return a listening abstract unix socket, which ends with its owners, and its name. Raises OSError."""
    name = f"adaptra-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, [name]


def listen_tcp(host: str, ports: PortRange | None = None) -> tuple[socket.socket, list[str | int]]:
    """Return a listening socket on `host`, at a free port of `ports` (None: any), and its address.

    Raises TransportError.
    """
    try:
        listener = bound_within(host, ports)
    except OSError as cause:
        remedy = "; choose a network interface that the other stages can reach by --adaptra-interface NAME"
        taken = ports is not None and cause.errno == errno.EADDRINUSE
        raise TransportError(f"cannot listen on {host}: {cause}{'' if taken else remedy}") from cause
    return listener, [host, listener.getsockname()[1]]


def listening_host(interface: str | None, *, one_host: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address to listen on: the address of `interface`, loopback if all peers are on this host, else a
    routable address.

    Between hosts and without `interface`, it is the address of the first interface in GLOO_SOCKET_IFNAME (if it has one
    beyond loopback), or of the route to MASTER_ADDR. Raises TransportError if the interface cannot be used, or no route
    to the master is known.
    """
    if interface is not None:
        return _address_of(interface, one_host)
    if one_host:
        return "127.0.0.1"
    if chosen := environment.get(INTERFACE_VARIABLE, "").partition(",")[0].strip():
        try:
            return _address_of(chosen, one_host)
        except TransportError as cause:
            logger.warning("%s is ignored: %s", INTERFACE_VARIABLE, cause)
    return _way_to(environment.get("MASTER_ADDR", ""))


def _address_of(interface: str, one_host: bool) -> str:
    try:
        host = interface_address(interface)
    except InterfaceError as cause:
        raise TransportError(f"{cause}; name one of them by --adaptra-interface NAME") from cause
    if not one_host and ipaddress.ip_address(host).is_loopback:
        raise TransportError(
            f"the network interface {interface!r} is loopback, but stages are on several hosts; name one that they all "
            "reach by --adaptra-interface NAME"
        )
    return host


def _way_to(master: str) -> str:
    """Return the address of this host on the route to another."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only asks for the route
            host = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as cause:  # UnicodeError: a part of the name is empty, or too long
        raise TransportError(
            f"cannot tell which interface leads to the other hosts: MASTER_ADDR is {master!r} ({cause}); "
            "name it by --adaptra-interface NAME"
        ) from cause
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise TransportError(
            f"MASTER_ADDR is {master!r}, which leads to {host} on this host, but stages are on several hosts; "
            "set MASTER_ADDR to an address that they all reach, or name the interface by --adaptra-interface NAME"
        )
    return host
