# SPDX-License-Identifier: Apache-2.0
"""Start sidecar processes of a training process with a channel to each; and recognise forked children."""

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
"""Imports this package by its root, which is then removed from `sys.path`, as is the working directory: either may hold
modules with the names of Python's own.
"""


ENDED_S = 5.0
"""How long a killed process may take to end, in seconds. One that waits for a dead disk or device may never end."""
BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers and terminals send to all processes of a job: the training process decides what follows."""


class OwningProcess:
    """The process that created this object.

    A forked child inherits copies of all objects, handlers and connections, and must not release its parent's
    resources.
    """

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_this(self) -> bool:
        """Return whether the calling process created this object, and is not a forked child."""
        return os.getpid() == self._id


class ChildProcess:
    """A running sidecar process, in a session of its own."""

    def __init__(self, module: str, kind: socket.SocketKind) -> None:
        """Start `main` of `module` in a new process. `kind`: socket type of the channel.

        `main` gets two arguments: the file descriptor of its end of the channel, and the process id of this process,
        with which it must end. The calling thread must live as long as the process, since the kernel ties the process
        to it. Raises OSError if this host cannot start a process.
        """
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
        root = str(Path(adaptra_megatron.__file__).parents[1])
        program = _PROGRAM.format(module=module)
        with theirs, _blocked(BLOCKED_SIGNALS):
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, root, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def end(self, patience_s: float) -> str:
        """Wait `patience_s` for the process to end, then kill it. Return how it ended, after ENDED_S more at most."""
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
    """Block `signals` for processes that this thread starts within this context, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
