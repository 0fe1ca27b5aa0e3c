# SPDX-License-Identifier: Apache-2.0
"""Find which of the host path's transports can be used here, and what keeps the others from it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from adaptra_megatron.tools.host_checks.devices import Interface
from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, Roots, read_text
from adaptra_megatron.transport.wires.verbs.verbs_device import Port, VerbsUnavailableError, find_ports, load_verbs

USABLE = "usable"
"""Key of a detail: whether the transport can be used between processes of this host."""
_CHOOSE = "--adaptra-interface NAME"
_WAIT_S = 5.0
_SETTLE_S = 0.02
_WITHOUT_DEVICE = (
    "modprobe mlx5_ib where there is an RNIC; to try verbs without one: "
    "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE"
)


def check_shm() -> HostFinding:
    """Does, within this process, what two processes do: a sealed memfd, its futex, an abstract socket."""
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
    """Return where delegates would listen if stages were on several hosts, and that a socket can listen there."""
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
    """Devices with a link, their files in /dev, pyverbs, and that each device opens."""
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
    """A message through a ring of two mappings to a thread that waits for it. Raises OSError, RuntimeError."""
    from adaptra_megatron.transport._ring import Inbox, Ring

    producer = Ring.create(2, 4096)
    consumer = Ring.attach(producer.fd)
    inbox, heard = Inbox(max_message_nbytes=0, pooled_nbytes=0), threading.Event()

    def listen() -> None:
        if inbox.next(consumer, time.monotonic() + _WAIT_S) is not None:
            heard.set()

    listener = threading.Thread(target=listen)
    listener.start()
    time.sleep(_SETTLE_S)  # it sleeps by now: only a working doorbell wakes it
    producer.write_ack(0, time.monotonic() + _WAIT_S)
    listener.join()
    if not heard.is_set():
        raise RuntimeError(f"a message in shared memory was not seen within {_WAIT_S:g} s: futexes do not wake")


def _abstract_socket() -> None:
    """Raises OSError."""
    address = f"\0adaptra-doctor-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as knocking:
        listener.bind(address)
        listener.listen(1)
        knocking.settimeout(_WAIT_S)
        knocking.connect(address)


def _closed_files(roots: Roots, ports: Sequence[Port]) -> list[str]:
    """Device files that this process may not use."""
    closed = []
    for port in ports:
        entries = (roots.sys / "class" / "infiniband_verbs").glob("uverbs*")
        names = [entry.name for entry in entries if read_text(entry / "ibdev") == port.device]
        for name in names or ["uverbs*"]:
            if not os.access(roots.dev / "infiniband" / name, os.R_OK | os.W_OK):
                closed.append(f"/dev/infiniband/{name} ({port.device})")
    return list(dict.fromkeys(closed))


def _faster(interfaces: Sequence[Interface], chosen: Interface | None) -> Interface | None:
    """An interface that is up and faster than the chosen one, as far as drivers say."""
    if chosen is None or chosen.speed_mbit_s is None:
        return None
    candidates = [i for i in interfaces if i.up and (i.speed_mbit_s or 0) > chosen.speed_mbit_s]
    return max(candidates, key=lambda interface: interface.speed_mbit_s or 0, default=None)
