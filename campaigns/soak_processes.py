# SPDX-License-Identifier: Apache-2.0
"""Processes of a job as Linux sees them: delegates of ranks, who is stopped, and what is left when all have ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

_DELEGATE = b"adaptra_megatron.transport.delegate.delegate"
_POLL_S = 0.002
_LISTENING = "0A"


class Process:
    """One process, which its number names even after another has taken it. Also a context manager."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if there is none."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self._descriptor, number)

    def ended(self, timeout_s: float) -> bool:
        """Return whether it ends within `timeout_s`."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def stopped(self, timeout_s: float) -> bool:
        """Return whether it is stopped within `timeout_s`."""
        return wait_until(lambda: state(self.pid) == "T", timeout_s)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    """Return whether `condition` becomes true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def state(pid: int) -> str:
    """The letter that Linux gives it (R, S, T, Z...); empty if there is no such process."""
    fields = _status(pid)
    return fields[0] if fields else ""


def delegate_of(rank: int) -> int | None:
    """Process id of the running delegate of the rank with this process id; None between two."""
    for child in _children(rank):
        try:
            if _DELEGATE in Path(f"/proc/{child}/cmdline").read_bytes() and state(child) != "Z":
                return child
        except OSError:  # it ended meanwhile
            continue
    return None


def pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal has been sent to a process that blocks it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {line[:6]: int(line.split()[1], 16) for line in lines if line.startswith(("ShdPnd", "SigBlk"))}
    return all(mask >> number - 1 & 1 for mask in masks.values())


def sockets(pid: int) -> tuple[dict[str, int], set[str]]:
    """TCP ports on which a process listens, by inode of the socket, and its addresses in the abstract namespace."""
    inodes = set()
    for target in _links(f"/proc/{pid}/fd"):
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    ports = {inode: port for inode, port in _listening_ports() if inode in inodes}
    names = {name for name, inode in _unix_names() if inode in inodes and name.startswith("@adaptra")}
    return ports, names


def leftovers(sessions: Iterable[int], ports: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """What a job has left behind, one line each.

    Args:
        sessions: process ids of ranks and delegates; each leads a session to which what it starts belongs.
        ports, names: what its processes listened on, as `sockets` says; another socket may have such a port by now.
    """
    found, leaders = [], set(sessions)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _status(int(entry.name))
        if fields and fields[0] != "Z" and int(fields[3]) in leaders:
            found.append(f"process {entry.name} of session {fields[3]} still runs")
    listening, known = dict(_listening_ports()), {name for name, _inode in _unix_names()}
    found += [f"a process still listens on port {port}" for inode, port in sorted(ports.items()) if inode in listening]
    found += [f"a process still listens on {name}" for name in sorted(set(names) & known)]
    return found


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (the state) on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _children(pid: int) -> Iterator[int]:
    """Children of all threads of `pid`: whichever started a process counts as its parent."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        try:
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:
            continue


def _links(directory: str) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{directory}/{name}")
        except OSError:
            continue


def _listening_ports() -> Iterator[tuple[str, int]]:
    """Inodes of listening sockets, and their ports."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                yield fields[9], int(fields[1].rpartition(":")[2], 16)


def _unix_names() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7:
            yield fields[7], fields[6]
