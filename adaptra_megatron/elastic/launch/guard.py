# SPDX-License-Identifier: Apache-2.0
"""A sidecar process of the launcher that kills the ranks' process groups once the launcher has ended.

Linux kills the ranks when the launcher ends, however it ends (`tied_process`). It does not kill other processes of a
rank's group, such as those of a shell script that is a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from adaptra_megatron.common.child_process import ChildProcess

_ENDED_S = 5.0


class Guard:
    """Launcher's side of the guard. The thread that creates it must live as long as it."""

    def __init__(self) -> None:
        """Start the process. Raises OSError if this host cannot start one."""
        self._child = ChildProcess(__name__, socket.SOCK_STREAM)

    def watch(self, group: int) -> None:
        """Kill this process group once the launcher has ended."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Stop watching a process group that is empty: its number may be reused."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the process, and kill the groups that it still watches."""
        with contextlib.suppress(OSError):
            self._child.channel.shutdown(socket.SHUT_WR)
        self._child.end(_ENDED_S)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: the kernel's tie between launcher and ranks is left
            self._child.channel.sendall(line.encode())


def kill_group(group: int) -> None:
    """Kill all processes of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the guard process. `arguments`: as `ChildProcess` gives them."""
    groups: set[int] = set()
    with socket.socket(fileno=int(arguments[0])) as channel, channel.makefile() as lines:
        # Until the end of file: the kernel closes the launcher's end of the channel, however the launcher ends.
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)
