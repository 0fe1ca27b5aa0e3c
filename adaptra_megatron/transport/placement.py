# SPDX-License-Identifier: Apache-2.0
"""Where the stages of a pipeline are, which transport joins two of them, and what their delegates listen on."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from adaptra_megatron.transport.handshake import SECRET_NBYTES
from adaptra_megatron.transport.interfaces import InterfaceError, interface_address
from adaptra_megatron.transport.messages import TransportError
from adaptra_megatron.transport.rendezvous import Rendezvous

TRANSPORTS = ("auto", "shm", "tcp", "verbs")
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
logger = logging.getLogger("adaptra_megatron.transport.placement")

SECRET_VARIABLE = "ADAPTRA_SECRET_FILE"
_LONGEST_SECRET = 4096
_SECRET_KEY = "adaptra/transport/secret"
_BACKLOG = 128


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set `key` to `desired` if it has the value `expected`, or none and that is empty; its value afterwards."""


def agree_on_host_path(rendezvous: Rendezvous, what: str, failure: Exception | None) -> None:
    """Raise TransportError on all stages alike if anything keeps one of them from the host path: `failure` this one.

    `what`: see `Rendezvous.agree`.
    """
    causes = rendezvous.agree(what, failure)
    if causes is not None:
        raise TransportError(
            f"the host path cannot be set up: {causes}; --adaptra-host-transport off runs without the host path"
        ) from failure


def boot_identity(proc: Path = Path("/proc")) -> str:
    """Equal for two processes exactly if they share a monotonic clock: the same boot of the same kernel.

    Where the kernel (or a sandbox in its place) does not say so, no other process has the same.
    """
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as cause:
        logger.warning("this host does not say which one it is (%s): no shared memory with other processes", cause)
        return f"unknown-{secrets.token_hex(16)}"


def host_identity(proc: Path = Path("/proc")) -> str:
    """Equal for two processes exactly if they can share memory through abstract unix sockets.

    The same boot of the same kernel, and the same network namespace: containers of one host may have their own. Where
    that is not said, no other process has the same: tcp works between any two.
    """
    try:
        return f"{boot_identity(proc)}/{os.stat(proc / 'self/ns/net').st_ino}"
    except OSError as cause:
        logger.warning("this process does not say which network it is in (%s): no shared memory with others", cause)
        return f"unknown-{secrets.token_hex(16)}/unknown"


def verbs_or_auto(lacking: Mapping[int, str | None], stage: int, peer: int) -> str:
    """What to choose by where verbs is asked for: "verbs", or "auto" if one of the two stages cannot use it.

    `lacking`: what each stage lacks for it. Both ends of a link come to the same.
    """
    cause = lacks_verbs(lacking, stage, peer)
    if cause is not None:
        logger.warning("link %d<->%d: no verbs, %s; falling back to auto", stage, peer, cause)
    return "verbs" if cause is None else "auto"


def lacks_verbs(lacking: Mapping[int, str | None], stage: int, peer: int) -> str | None:
    """What keeps a link from verbs by what each stage lacks for it; None if nothing does. The same at both ends."""
    causes = [f"stage {end}: {cause}" for end in sorted((stage, peer)) if (cause := lacking[end]) is not None]
    return "; ".join(causes) or None


def choose_transport(
    wanted: str, ours: str, theirs: str, link: str, without_verbs: str | None = "nobody looked for it"
) -> str:
    """The transport between two stages with the host identities `ours` and `theirs`: "shm", "tcp" or "verbs".

    `without_verbs`: what keeps the link from verbs; if nothing does, auto chooses it between hosts. That both ends
    have an RDMA device with a link does not say that one reaches the other: see link_session for what becomes of it.

    Raises TransportError if shm is forced between hosts.
    """
    if wanted == "auto":
        if ours == theirs:
            return "shm"
        if without_verbs is not None:
            logger.info("link %s: tcp, not verbs: %s", link, without_verbs)
        return "verbs" if without_verbs is None else "tcp"
    if wanted == "shm" and ours != theirs:
        raise TransportError(
            f"link {link}: shared memory was asked for, but its stages are on different hosts (or in containers with "
            f"networks of their own): {ours} and {theirs}; use --adaptra-host-transport auto or tcp"
        )
    return wanted


def job_secret(store: Store, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of this job, the same on every rank: of the launcher's file, or what the first rank that asks puts
    into the job's store.

    Raises TransportError if the file may be read by others or is no secret, or if the store has something else in the
    secret's place; without saying what.
    """
    if path := environment.get(SECRET_VARIABLE):
        return _secret_of(path)
    mine = secrets.token_hex(SECRET_NBYTES)
    found = store.compare_set(_SECRET_KEY, "", mine)
    if re.fullmatch(rb"[0-9a-f]{%d}" % (2 * SECRET_NBYTES), found) is None:
        raise TransportError(
            f"the job's store has {len(found)} bytes under {_SECRET_KEY!r} that are no secret of this release: install "
            "the same release on all ranks, and keep MASTER_PORT closed to others"
        )
    return bytes.fromhex(found.decode())


def _secret_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(_LONGEST_SECRET).strip()
    except OSError as cause:
        raise TransportError(f"{SECRET_VARIABLE}: {cause}; it is to name a file that this rank can read") from cause
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise TransportError(
            f"{SECRET_VARIABLE}: {path} has mode {stat.filemode(status.st_mode)} and is user {status.st_uid}'s: it is "
            "to be a file that its owner, the user of this job, alone can read (chmod 600)"
        )
    if len(content) < SECRET_NBYTES:
        raise TransportError(
            f"{SECRET_VARIABLE}: {path} has {len(content)} bytes, fewer than {SECRET_NBYTES}: make it with "
            "head -c 32 /dev/urandom | base64"
        )
    return hashlib.sha256(b"adaptra-megatron\n" + content).digest()


def listen_shm() -> tuple[socket.socket, list[str | int]]:
    """A listening unix socket without a place in the file system, and its address. It vanishes with its owners.

    Raises OSError.
    """
    name = f"adaptra-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, [name]


def listen_tcp(host: str) -> tuple[socket.socket, list[str | int]]:
    """A listening socket on a free port of the address `host` alone, and its address. Raises TransportError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError as cause:
        listener.close()
        raise TransportError(
            f"cannot listen on {host}: {cause}; choose a network interface that the other stages can reach by "
            "--adaptra-interface NAME"
        ) from cause
    return listener, [host, listener.getsockname()[1]]


def listening_host(interface: str | None, *, one_host: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Address to listen on: that of the interface, loopback if nobody comes from elsewhere, or what leads there.

    Between hosts, and where no interface is given, that is the interface that GLOO_SOCKET_IFNAME names for
    torch.distributed's own TCP traffic (its first, if it has an address beyond loopback), or the one of the way to the
    master.

    Raises TransportError when the interface cannot be used, or the master's address says nothing.
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
    """Address of this host on the way to another."""
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
