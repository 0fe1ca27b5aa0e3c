# SPDX-License-Identifier: Apache-2.0
"""TCP connections of gloo's process groups, which can be shut down while operations use them.

torch's ProcessGroupGloo has no way to end what is under way: `abort()` does nothing, and its destructor first runs what
is queued to its end (ProcessGroupGloo.cpp, ~ProcessGroupGloo). A socket that is shut down fails the operations on both
ends within a millisecond (gloo/transport/tcp/pair.cc: an end of file is an error of the pair, and so of all that waits
in its context). Sockets are found by their addresses: each group has a device, and so a listener, of its own. This
process's own descriptors are asked, one by one: /proc/net/tcp has those of the whole host, is read page by page while
it changes, and leaves some out; and socket objects of Python would change the blocking mode of what they duplicate
where a script has set a default timeout.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from adaptra_megatron.job.process_groups import gloo_group

_MAKES_DEVICE = threading.Lock()
_TRIES = 20
_LONGEST_NBYTES = 128
"""Of an address (sockaddr_storage)."""


class GlooSockets(NamedTuple):
    """Where the connections of one group end: addresses as `_Socket` has them."""

    own: str
    """Listener of this process."""
    peers: frozenset[str]
    """Listeners of the other members."""

    def shut_down(self) -> None:
        """End all connections, so that all operations of the group fail, here and at its other members."""
        libc = ctypes.CDLL(None)
        for each in _sockets():
            if each.remote and (each.local == self.own or each.remote in self.peers):
                libc.shutdown(each.number, socket.SHUT_RDWR)


class _Socket(NamedTuple):
    """A TCP socket of this process."""

    number: int
    """File descriptor of a duplicate."""
    inode: str
    local: str
    """Port and address."""
    remote: str
    """The same of its peer; empty: it has none, as a listener."""


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
            new = [each.local for each in _sockets() if each.inode not in before and not each.remote]
            if len(new) == 1:  # else another thread has opened a socket in the same moment
                return device, new[0]
    raise RuntimeError(f"gloo's listener cannot be identified among those of other threads, in {_TRIES} tries")


def _default_device() -> Any:
    """Make a device as torch.distributed does for a group: for GLOO_SOCKET_IFNAME, or this host's name."""
    gloo: Any = dist.ProcessGroupGloo
    name = next(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")), None)
    return gloo.create_default_device() if name is None else gloo.create_device(interface=name)


def _sockets() -> Iterator[_Socket]:
    """List this process's TCP sockets. Each duplicate is closed once the next is asked for: whatever becomes of the
    descriptor that it was made of, it stays the same socket."""
    libc = ctypes.CDLL(None)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it has been closed meanwhile
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith("socket:"):
                continue
            number = os.dup(int(name))
            try:
                if local := _address(libc.getsockname, number):
                    inode, remote = str(os.fstat(number).st_ino), _address(libc.getpeername, number)
                    yield _Socket(number, inode, local, remote)
            finally:
                os.close(number)


def _address(ask: Callable[..., int], number: int) -> str:
    """Return the port and address that a function of libc gives of a socket; empty where there is none of TCP."""
    found, length = ctypes.create_string_buffer(_LONGEST_NBYTES), ctypes.c_uint32(_LONGEST_NBYTES)
    if ask(number, found, ctypes.byref(length)):
        return ""
    family = int.from_bytes(found.raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return found.raw[2:8].hex()
    # Without flow and scope, which are each host's own (struct sockaddr_in6).
    return (found.raw[2:4] + found.raw[8:24]).hex() if family == socket.AF_INET6 else ""
