# SPDX-License-Identifier: Apache-2.0
"""A sidecar process of the launcher that ends just after it: what ranks have started ends with them.

Linux kills the ranks when the launcher ends, however it ends (`tied_process`), but not the processes of a rank's group,
such as those of a shell script that is a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from adaptra_megatron.common.child_process import ChildProcess

_ENDED_S = 5.0


class Guard:
    """The launcher's side. The thread that makes it must live as long as it."""

    def __init__(self) -> None:
        """Raises OSError if this host has no room for a process."""
        self._child = ChildProcess(__name__, socket.SOCK_STREAM)

    def watch(self, group: int) -> None:
        """Kill this process group once the launcher has ended."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave a process group alone that is empty: its number may be another's by then."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the process, and the groups that it still watches."""
        with contextlib.suppress(OSError):
            self._child.channel.shutdown(socket.SHUT_WR)
        self._child.end(_ENDED_S)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: the kernel's tie between launcher and ranks is left
            self._child.channel.sendall(line.encode())


def kill_group(group: int) -> None:
    """Kill what there is of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """The guard's side. `arguments`: as `ChildProcess` gives them."""
    groups: set[int] = set()
    with socket.socket(fileno=int(arguments[0])) as channel, channel.makefile() as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)
