# SPDX-License-Identifier: Apache-2.0
"""A sidecar process of a training process, and the channel to it; and children that scripts fork."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import adaptra_megatron

_PROGRAM = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import adaptra_megatron; del sys.path[0]; "
    "from {module} import main; main(sys.argv[2:])"
)
"""This very package, but nothing else of its directory, nor of the working directory: they may hold modules that go by
the names of Python's own."""


ENDED_S = 5.0
"""How long a process that was killed may take to end. One that waits for a dead disk or device may never."""
UNHEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers and terminals send to all processes of a job: the training process decides what comes of it."""


class OwningProcess:
    """The process that made this. A child that is forked from it has copies of all objects and handlers, which share
    connections with it: what they release is not the child's."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_this(self) -> bool:
        """Return whether this process is the one."""
        return os.getpid() == self._id


class ChildProcess:
    """One running process, in a session of its own."""

    def __init__(self, module: str, kind: socket.SocketKind) -> None:
        """Runs `main` of `module` with two arguments: the descriptor of its end of the channel, and the process id of
        this process, which it is to end with. `kind`: of the channel.

        The calling thread must live as long as the process: the kernel ties its life to that thread's. Raises OSError
        if this host has no room for a process.
        """
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
        root = str(Path(adaptra_megatron.__file__).parents[1])
        program = _PROGRAM.format(module=module)
        with theirs, _blocked(UNHEARD):
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, root, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def end(self, patience_s: float) -> str:
        """Wait for it to end by itself, then see to it. Returns how it ended, at most ENDED_S after `patience_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        if self.process.returncode is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDED_S)
        self.channel.close()
        status = self.process.returncode
        if status is None:
            return f"no means: the kernel keeps process {self.process.pid}, which was killed"
        if status >= 0:
            return f"exit status {status}"
        known = {each.value: each.name for each in signal.Signals}
        return f"signal {known.get(-status, -status)}"


@contextlib.contextmanager
def _blocked(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Within, a process that this thread starts does not get these signals, from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
