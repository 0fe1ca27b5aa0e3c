# SPDX-License-Identifier: Apache-2.0
"""Limits of the kernel and of this process that the transports meet."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass

from adaptra_megatron.tools.host_checks.host_findings import (
    HostFinding,
    HostLevel,
    Roots,
    read_number,
    read_text,
    spelled_nbytes,
)
from adaptra_megatron.transport.host_settings import MEBIBYTE, HostSettings

OLDEST_KERNEL = (3, 17)
"""memfd_create and sealing."""
_CAP_IPC_LOCK = 14
_FEW_FILES = 1024
_SMALL_TCP_BUFFER_NBYTES = 4 * MEBIBYTE
_SMALL_SHARED_MEMORY_NBYTES = 1024 * MEBIBYTE
_NEIGHBOURS = 2


@dataclass(frozen=True)
class ProcessLimits:
    """Soft limits of this process, None for unlimited."""

    locked_nbytes: int | None
    open_files: int | None
    shared_memory_free_nbytes: int | None
    """Free bytes of /dev/shm; None where there is none."""


def limits_of_this_process(roots: Roots) -> ProcessLimits:
    """Current limits of the kernel."""
    locked, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    try:
        status = os.statvfs(roots.dev / "shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = None
    return ProcessLimits(_finite(locked), _finite(files), free)


def check_limits(roots: Roots, limits: ProcessLimits, settings: HostSettings) -> list[HostFinding]:
    """Kernel, locked memory, files, TCP buffers and shared memory."""
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
    """Bytes that verbs registers: both rings of each link, once per RNIC."""
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
    """The kernel sizes buffers by itself up to the last number of tcp_rmem and tcp_wmem; we never set them."""
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
