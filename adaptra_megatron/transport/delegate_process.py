# SPDX-License-Identifier: Apache-2.0
"""A running delegate as its training process has it: the process, and the channel to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import adaptra_megatron
from adaptra_megatron.transport import control
from adaptra_megatron.transport.control import ControlEndedError, Start
from adaptra_megatron.transport.heartbeat import Heartbeat

_DELEGATE = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import adaptra_megatron; del sys.path[0]; "
    "from adaptra_megatron.transport.delegate import main; main(sys.argv[2:])"
)
"""This very package, but nothing else of its directory, nor of the working directory: they may hold modules that go by
the names of Python's own."""


class DelegateProcess:
    """One running delegate process."""

    def __init__(self, start: Start, listeners: Sequence[socket.socket]) -> None:
        """Starts it. The calling thread must live as long as it: the kernel ties its life to that thread's.

        Raises OSError if this host has no room for a process.
        """
        self.heartbeat = Heartbeat(time.monotonic())
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(adaptra_megatron.__file__).parents[1])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _DELEGATE, root, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.channel.settimeout(5.0)
        with contextlib.suppress(ControlEndedError):  # seen where the channel is read
            control.send(self.channel, start, [listener.fileno() for listener in listeners])

    def end(self, patience_s: float) -> str:
        """Wait for it to end by itself, then see to it. Returns how it ended."""
        try:
            status = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.channel.close()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
