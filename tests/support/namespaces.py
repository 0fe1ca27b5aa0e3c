# SPDX-License-Identifier: Apache-2.0
"""Two hosts in one: network namespaces of Linux, joined by a virtual cable that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

ADDRESSES = ("10.99.0.1", "10.99.0.2")
_NEW_NETWORK = 0x40000000
_NOWHERE = "02:00:00:00:00:99"


class Host:
    """A namespace, and a thread in it: what that starts, and opens, belongs there."""

    def __init__(self) -> None:
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
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with ADDRESSES; skips the test where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            one, other = (stack.enter_context(contextlib.closing(Host())) for _ in range(2))
            one.run(f"link add wire type veth peer name wire netns {other.pid}")
            for host, address in zip((one, other), ADDRESSES, strict=True):
                host.run(f"addr add {address}/24 dev wire")
                host.run("link set wire up")
                host.run("link set lo up")
        except (OSError, subprocess.SubprocessError) as cause:
            pytest.skip(f"network namespaces cannot be made here: {cause}")
        yield one, other


def cut(hosts: tuple[Host, Host]) -> None:
    """From now on, frames go to an address of Ethernet that no host has."""
    for host, peer in zip(hosts, reversed(ADDRESSES), strict=True):
        host.run(f"neigh replace {peer} lladdr {_NOWHERE} dev wire nud permanent")


def mend(hosts: tuple[Host, Host]) -> None:
    for host, peer in zip(hosts, reversed(ADDRESSES), strict=True):
        host.run(f"neigh del {peer} dev wire")
