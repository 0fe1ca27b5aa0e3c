# SPDX-License-Identifier: Apache-2.0
"""Check which of the host path's transports work here, and the limits of kernel and process that concern them."""

from __future__ import annotations

import os
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from adaptra_megatron.tools.host_checks.devices import Interface
from adaptra_megatron.tools.host_checks.host_findings import (
    HostFinding,
    HostLevel,
    Roots,
    read_number,
    read_text,
    spelled_nbytes,
)
from adaptra_megatron.transport.host_settings import MEBIBYTE, HostSettings
from adaptra_megatron.transport.wires.verbs.verbs_device import Port, VerbsUnavailableError, find_ports, load_verbs

OLDEST_KERNEL = (3, 17)
"""First kernel with memfd_create and sealing."""
_CAP_IPC_LOCK = 14
_FEW_FILES = 1024
_SMALL_TCP_BUFFER_NBYTES = 4 * MEBIBYTE
_SMALL_SHARED_MEMORY_NBYTES = 1024 * MEBIBYTE
_NEIGHBOURS = 2


@dataclass(frozen=True)
class ProcessLimits:
    """Soft limits of this process; None if unlimited."""

    locked_nbytes: int | None
    open_files: int | None
    shared_memory_free_nbytes: int | None
    """Free bytes of /dev/shm; None if there is none."""


def limits_of_this_process(roots: Roots) -> ProcessLimits:
    """Return the present limits."""
    locked, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    try:
        status = os.statvfs(roots.dev / "shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = None
    return ProcessLimits(_finite(locked), _finite(files), free)


def check_limits(roots: Roots, limits: ProcessLimits, settings: HostSettings) -> list[HostFinding]:
    """Check kernel, locked memory, open files, TCP buffers and shared memory."""
    return [
        _kernel(roots),
        _locked_memory(roots, limits, settings),
        _open_files(limits),
        _tcp_buffers(roots),
        _shared_memory(limits),
    ]


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _kernel(roots: Roots) -> HostFinding:
    release = read_text(roots.proc / "sys" / "kernel" / "osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    details = {"release": release}
    if version is None:
        return HostFinding(
            subject="kernel",
            level=HostLevel.PROBLEM,
            text=f"cannot tell the version of the kernel from {release!r}",
            remedy="mount /proc; the host path needs Linux",
            details=details,
        )
    if version < OLDEST_KERNEL:
        return HostFinding(
            subject="kernel",
            level=HostLevel.PROBLEM,
            text=f"Linux {release} has no sealed anonymous memory (memfd)",
            remedy=f"use Linux {'.'.join(map(str, OLDEST_KERNEL))} or later",
            fatal=True,
            details=details,
        )
    return HostFinding(subject="kernel", level=HostLevel.OK, text=f"Linux {release}", details=details)


def _locked_memory(roots: Roots, limits: ProcessLimits, settings: HostSettings) -> HostFinding:
    """Check the limit of locked memory: verbs registers both rings of each link, once per RNIC."""
    rnics = len(list((roots.sys / "class" / "infiniband").glob("*")))
    needed = 2 * _NEIGHBOURS * settings.slots * settings.slot_nbytes * max(1, rnics)
    limit, exempt = limits.locked_nbytes, _may_lock_any(roots)
    details = {"limit_nbytes": limit, "needed_nbytes": needed, "exempt": exempt}
    said = "unlimited" if limit is None else f"{spelled_nbytes(limit)} per process (ulimit -l)"
    if limit is None or limit >= needed or exempt:
        if exempt and limit is not None:
            said += ", which does not bind this process (CAP_IPC_LOCK)"
        return HostFinding(subject="locked memory", level=HostLevel.OK, text=said, details=details)
    said += f", less than the {spelled_nbytes(needed)} that verbs locks on a stage with two neighbours"
    remedy = "ulimit -l unlimited, or memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1)"
    if not rnics:
        said += "; without an RDMA device that does not matter"
    level, remedy = (HostLevel.PROBLEM, remedy) if rnics else (HostLevel.OK, "")
    return HostFinding(subject="locked memory", level=level, text=said, remedy=remedy, details=details)


def _may_lock_any(roots: Roots) -> bool:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text(roots.proc / "self" / "status"), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)


def _open_files(limits: ProcessLimits) -> HostFinding:
    limit = limits.open_files
    few = limit is not None and limit < _FEW_FILES
    return HostFinding(
        subject="open files",
        level=HostLevel.NOTE if few else HostLevel.OK,
        text="unlimited" if limit is None else f"{limit} per process (ulimit -n)",
        remedy=f"ulimit -n {64 * _FEW_FILES}: data loaders and process groups of large jobs need many" if few else "",
        details={"limit": limit},
    )


def _tcp_buffers(roots: Roots) -> HostFinding:
    """Check the largest TCP buffers, the last numbers of tcp_rmem and tcp_wmem; the kernel chooses sizes up to
    these."""
    net = roots.proc / "sys" / "net"
    largest = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        words = read_text(net / "ipv4" / name).split()
        largest[name] = int(words[2]) if len(words) == 3 else None
    core = {name: read_number(net / "core" / name) for name in ("rmem_max", "wmem_max")}
    spelled = [
        f"{name} {'unknown' if nbytes is None else spelled_nbytes(nbytes)}"
        for name, nbytes in (*largest.items(), *core.items())
    ]
    small = [name for name, nbytes in largest.items() if nbytes is not None and nbytes < _SMALL_TCP_BUFFER_NBYTES]
    text = (
        f"a connection's buffer grows to: {', '.join(spelled[:2])}; for programs that set it: {', '.join(spelled[2:])}"
    )
    remedy = ""
    if small:
        text += f"; {' and '.join(small)} hold back fast links with long round trips"
        remedy = "sysctl -w " + " ".join(f"net.ipv4.{name}='4096 131072 16777216'" for name in small)
    return HostFinding(
        subject="TCP buffers",
        level=HostLevel.NOTE if small else HostLevel.OK,
        text=text,
        remedy=remedy,
        details={**largest, **core},
    )


def _shared_memory(limits: ProcessLimits) -> HostFinding:
    free = limits.shared_memory_free_nbytes
    small = free is None or free < _SMALL_SHARED_MEMORY_NBYTES
    said = "there is no /dev/shm" if free is None else f"{spelled_nbytes(free)} free in /dev/shm"
    return HostFinding(
        subject="shared memory",
        level=HostLevel.NOTE if small else HostLevel.OK,
        text=f"{said}; our rings do not use it (they are anonymous), Megatron's data loaders and NCCL do",
        remedy="give the container more: docker run --shm-size=8g, or --ipc=host" if small else "",
        details={"free_nbytes": free},
    )


USABLE = "usable"
"""Key of a detail: whether the transport works between processes of this host."""
_CHOOSE = "--adaptra-interface NAME"
_WAIT_S = 5.0
_SETTLE_S = 0.02
_WITHOUT_DEVICE = (
    "modprobe mlx5_ib where there is an RNIC; to try verbs without one: "
    "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE"
)


def check_shm() -> HostFinding:
    """Check shared memory: use a sealed memfd, its futex and an abstract socket in this process, as two processes
    do."""
    try:
        _ring_and_doorbell()
        _abstract_socket()
    except ImportError as cause:
        return HostFinding(
            subject="shm",
            level=HostLevel.PROBLEM,
            text=f"the native module of the transport does not load: {cause}",
            remedy="see the native modules below",
        )
    except (OSError, RuntimeError) as cause:
        return HostFinding(
            subject="shm",
            level=HostLevel.PROBLEM,
            text=f"cannot be used: {cause}",
            remedy="allow memfd_create, futex and abstract unix sockets in the container's seccomp profile",
        )
    text = "usable: anonymous shared memory, wake-ups across processes and abstract unix sockets work"
    return HostFinding(subject="shm", level=HostLevel.OK, text=text, details={USABLE: True})


def check_tcp(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> HostFinding:
    """Check TCP: where delegates would listen for other hosts, and that a socket can listen there."""
    try:
        from adaptra_megatron.transport.message_keys import TransportError
        from adaptra_megatron.transport.setup.host_placement import INTERFACE_VARIABLE, listen_tcp, listening_host
    except ImportError as cause:
        text = f"nothing is known: {cause}"
        return HostFinding(subject="tcp", level=HostLevel.PROBLEM, text=text, remedy="see the versions below")
    here = "between stages on this host alone, delegates listen on 127.0.0.1"
    named = "; ".join(f"{interface.addresses[0]} ({interface})" for interface in interfaces if interface.up)
    details: dict[str, object] = {USABLE: True, "addresses": {i.name: list(i.addresses) for i in interfaces}}
    if not environment.get("MASTER_ADDR") and not environment.get(INTERFACE_VARIABLE):
        text = (
            f"usable: {here}; between hosts on the address of {_CHOOSE}, or else of the way to MASTER_ADDR, which is "
            f"not set here: one of {named or 'none'}"
        )
        return HostFinding(subject="tcp", level=HostLevel.OK, text=text, details=details)
    try:
        host = listening_host(None, one_host=False, environment=environment)
        listener, _address = listen_tcp(host)
        listener.close()
    except TransportError as cause:
        return HostFinding(
            subject="tcp",
            level=HostLevel.NOTE,
            text=f"{here}; between hosts not usable: {cause}",
            remedy=f"{_CHOOSE}, or MASTER_ADDR, an address that all hosts reach; this host has {named or 'none'}",
            details=details,
        )
    chosen = next((interface for interface in interfaces if host in interface.addresses), None)
    details |= {"listens_on": host, "interface": chosen.name if chosen else None}
    ways = {INTERFACE_VARIABLE: "as {name} {value} says", "MASTER_ADDR": "the way to {name} {value}"}
    way = next(way.format(name=name, value=value) for name, way in ways.items() if (value := environment.get(name)))
    text = f"usable: {here}; between hosts on {host}" + (f" ({chosen})" if chosen else "")
    text += f", {way}; {_CHOOSE} chooses another"
    faster = _faster(interfaces, chosen)
    if faster is None:
        return HostFinding(subject="tcp", level=HostLevel.OK, text=text, details=details)
    text += f"; {faster} is faster"
    remedy = f"--adaptra-interface {faster.name}, if the other hosts are reached over it"
    return HostFinding(subject="tcp", level=HostLevel.NOTE, text=text, remedy=remedy, details=details)


def check_verbs(roots: Roots, load: Callable[[], SimpleNamespace] = load_verbs) -> HostFinding:
    """Check verbs: devices with a link, their files in /dev, pyverbs, and that each device opens."""
    sysfs = roots.sys / "class" / "infiniband"
    try:
        ports = find_ports([], sysfs)
    except VerbsUnavailableError as cause:
        remedy = (
            "see RNICs above" if sysfs.exists() else "nothing, or: modprobe mlx5_ib; to try it out without an RNIC: "
        )
        if not sysfs.exists():
            remedy += "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE"
        return _unusable(str(cause), remedy, HostLevel.NOTE)
    if closed := _closed_files(roots, ports):
        remedy = "docker run --device=/dev/infiniband (or the RDMA device plugin); on the host: modprobe ib_uverbs"
        return _unusable(f"{', '.join(closed)} cannot be opened", remedy, HostLevel.PROBLEM)
    try:
        verbs = load()
    except VerbsUnavailableError as cause:
        remedy = (
            "apt-get install python3-pyverbs ibverbs-providers (its Python must be this one), or put it on PYTHONPATH"
        )
        return _unusable(str(cause), remedy, HostLevel.PROBLEM)
    for port in ports:
        try:
            verbs.Context(name=port.device).close()
        except verbs.Error as cause:
            remedy = (
                "install the device's user-space driver: apt-get install ibverbs-providers; ibv_devinfo must show it"
            )
            return _unusable(f"{port.device} does not open: {cause}", remedy, HostLevel.PROBLEM)
    names = [f"{port.device}/{port.number}" for port in ports]
    text = f"usable over {', '.join(names)}; whether they reach the other hosts, only a run shows"
    return HostFinding(subject="verbs", level=HostLevel.OK, text=text, details={USABLE: True, "ports": names})


def _unusable(cause: str, remedy: str, level: HostLevel) -> HostFinding:
    text = f"not usable: {cause}; --adaptra-host-transport verbs falls back to auto"
    return HostFinding(subject="verbs", level=level, text=text, remedy=remedy, details={"cause": cause})


def _ring_and_doorbell() -> None:
    """Send a message through a ring to a waiting thread, with two mappings. Raises OSError, RuntimeError."""
    from adaptra_megatron.transport._ring import Inbox, Ring

    producer = Ring.create(2, 4096)
    consumer = Ring.attach(producer.fd)
    inbox, received = Inbox(max_message_nbytes=0, pooled_nbytes=0), threading.Event()

    def listen() -> None:
        if inbox.next(consumer, time.monotonic() + _WAIT_S) is not None:
            received.set()

    listener = threading.Thread(target=listen)
    listener.start()
    time.sleep(_SETTLE_S)  # it sleeps by now: only a working doorbell wakes it
    producer.write_ack(0, time.monotonic() + _WAIT_S)
    listener.join()
    if not received.is_set():
        raise RuntimeError(f"a message in shared memory was not seen within {_WAIT_S:g} s: futexes do not wake")


def _abstract_socket() -> None:
    """Connect to an abstract unix socket. Raises OSError."""
    address = f"\0adaptra-doctor-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as knocking:
        listener.bind(address)
        listener.listen(1)
        knocking.settimeout(_WAIT_S)
        knocking.connect(address)


def _closed_files(roots: Roots, ports: Sequence[Port]) -> list[str]:
    """Return the device files that this process may not use."""
    closed = []
    for port in ports:
        entries = (roots.sys / "class" / "infiniband_verbs").glob("uverbs*")
        names = [entry.name for entry in entries if read_text(entry / "ibdev") == port.device]
        for name in names or ["uverbs*"]:
            if not os.access(roots.dev / "infiniband" / name, os.R_OK | os.W_OK):
                closed.append(f"/dev/infiniband/{name} ({port.device})")
    return list(dict.fromkeys(closed))


def _faster(interfaces: Sequence[Interface], chosen: Interface | None) -> Interface | None:
    """Return an interface that is up and faster than the chosen one, by the drivers' speeds; None if there is none."""
    if chosen is None or chosen.speed_mbit_s is None:
        return None
    candidates = [i for i in interfaces if i.up and (i.speed_mbit_s or 0) > chosen.speed_mbit_s]
    return max(candidates, key=lambda interface: interface.speed_mbit_s or 0, default=None)
