# SPDX-License-Identifier: Apache-2.0
"""Several hosts in one: network namespaces of Linux, joined by a virtual switch whose cables can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest

ADDRESSES = ("10.99.0.1", "10.99.0.2", "10.99.0.3")
WIRE = "wire"
"""Each host's interface."""
_NEW_NETWORK = 0x40000000
_NOWHERE = "02:00:00:00:00:99"


class Host:
    """A namespace, and a thread in it: what that starts, and opens, belongs there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._thread = ThreadPoolExecutor(1)
        self.pid = self.call(self._enter)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Its result."""
        return self._thread.submit(function, *arguments).result(timeout=20.0)

    def run(self, command: str) -> None:
        """A command of iproute2. Raises CalledProcessError."""
        self.call(lambda: subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=10.0))

    def close(self) -> None:
        """It goes with what is in it."""
        self._thread.shutdown()

    @staticmethod
    def _enter() -> int:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "no new network namespace")
        return threading.get_native_id()


@contextlib.contextmanager
def joined_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Namespaces with the first of ADDRESSES; skips the test where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = tuple(stack.enter_context(contextlib.closing(Host(address))) for address in ADDRESSES[:count])
            hosts[0].run(f"link add {WIRE} type bridge")
            for number, host in enumerate(hosts[1:]):
                hosts[0].run(f"link add port{number} type veth peer name {WIRE} netns {host.pid}")
                hosts[0].run(f"link set port{number} master {WIRE} up")
            for host in hosts:
                host.run(f"addr add {host.address}/24 dev {WIRE}")
                host.run(f"link set {WIRE} up")
                host.run("link set lo up")
        except (OSError, subprocess.SubprocessError) as cause:
            pytest.skip(f"network namespaces cannot be made here: {cause}")
        yield hosts


def cut(hosts: Sequence[Host]) -> None:
    """From now on, frames between them go to an address of Ethernet that no host has."""
    for host, peer in permutations(hosts, 2):
        host.run(f"neigh replace {peer.address} lladdr {_NOWHERE} dev {WIRE} nud permanent")


def mend(hosts: Sequence[Host]) -> None:
    for host, peer in permutations(hosts, 2):
        host.run(f"neigh del {peer.address} dev {WIRE}")
