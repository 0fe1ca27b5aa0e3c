# SPDX-License-Identifier: Apache-2.0
"""TCP connections of gloo's process groups, which can be shut down while operations use them.

torch's ProcessGroupGloo has no way to end what is under way: `abort()` does nothing, and its destructor first runs what
is queued to its end (ProcessGroupGloo.cpp, ~ProcessGroupGloo). A socket that is shut down fails the operations on both
ends within a millisecond (gloo/transport/tcp/pair.cc: an end of file is an error of the pair, and so of all that waits
in its context). Sockets are found by their addresses: each group has a device, and so a listener, of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from adaptra_megatron.job.process_groups import gloo_group

_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp (TCP_LISTEN, include/net/tcp_states.h)."""
_MAKES_DEVICE = threading.Lock()
_TRIES = 20


class GlooSockets(NamedTuple):
    """Where the connections of one group end: addresses as /proc/net/tcp has them."""

    own: str
    """Listener of this process."""
    peers: frozenset[str]
    """Listeners of the other members."""

    def shut_down(self) -> None:
        """End all connections, so that all operations of the group fail, here and at its other members."""
        for each in _sockets():
            if each.state != _LISTENS and (each.local == self.own or each.remote in self.peers):
                with suppress(OSError):  # it has been closed meanwhile
                    _shut_down(each)


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    inode: str
    number: int
    """File descriptor."""


def connected_group(store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, GlooSockets]:
    """Make a gloo group of `size` processes that meet in `store`, of which this is number `rank`.

    Raises RuntimeError when one does not come within `timeout_s`.
    """
    device, own = _device()
    store.set(f"listener/{rank}", own)
    group = gloo_group(store, rank, size, timedelta(seconds=timeout_s), [device])
    others = [f"listener/{each}" for each in range(size) if each != rank]
    peers = frozenset(found.decode() for found in store.multi_get(others)) if others else frozenset[str]()
    return group, GlooSockets(own, peers)


def _device() -> tuple[Any, str]:
    """Make a device, and find the address that its listener has."""
    with _MAKES_DEVICE:
        for _ in range(_TRIES):
            before = {each.inode for each in _sockets()}
            device = _default_device()
            new = [each.local for each in _sockets() if each.inode not in before and each.state == _LISTENS]
            if len(new) == 1:  # else another thread has begun to listen in the same moment
                return device, new[0]
    raise RuntimeError(f"gloo's listener cannot be identified among those of other threads, in {_TRIES} tries")


def _default_device() -> Any:
    """Make a device as torch.distributed does for a group: for GLOO_SOCKET_IFNAME, or this host's name."""
    gloo: Any = dist.ProcessGroupGloo
    name = next(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")), None)
    return gloo.create_default_device() if name is None else gloo.create_device(interface=name)


def _sockets() -> Sequence[_Socket]:
    """List this process's TCP sockets."""
    numbers = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").rstrip("]").partition(":[")
            if kind == "socket":
                numbers[inode] = int(name)
    found = []
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        with suppress(FileNotFoundError):  # without IPv6
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in numbers:
                    found.append(_Socket(fields[1], fields[2], fields[3], fields[9], numbers[fields[9]]))
    return found


def _shut_down(found: _Socket) -> None:
    """Shut a socket down, unless its descriptor has become another's since it was looked up."""
    with socket.socket(fileno=os.dup(found.number)) as same:
        if str(os.fstat(same.fileno()).st_ino) == found.inode:
            same.shutdown(socket.SHUT_RDWR)
