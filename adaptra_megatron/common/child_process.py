# SPDX-License-Identifier: Apache-2.0
"""Start sidecar processes of a training process with a channel to each; and recognise forked children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import adaptra_megatron
from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)

_LOOKS_S = 0.005
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

    A forked child has copies of all objects, handlers and connections, and must not release its parent's.
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
        with theirs, blocked(BLOCKED_SIGNALS):
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
def blocked(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Block `signals` for processes that this thread starts within this context, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_descendants(process: BaseProcess) -> None:
    """Kill a child process and all processes that it has started; return once none of them runs any more.

    Logs those that the kernel keeps for more than ENDED_S.
    """
    if not process.is_alive():
        return
    found, seen = list[int](), [process.pid or 0]
    while seen:
        pid = seen.pop()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # it starts no further ones
            found.append(pid)
            seen += _children(pid)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join(ENDED_S)
    deadline_s = time.monotonic() + ENDED_S
    while running := [pid for pid in found if _state(pid)[0] not in "ZX"]:
        if time.monotonic() > deadline_s:
            logger.error("the kernel keeps processes %s, which were killed: they wait for a device or disk", running)
            return
        time.sleep(_LOOKS_S)


def _children(parent: int) -> list[int]:
    pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [pid for pid in pids if _state(pid)[1] == parent]


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent; X (dead) if there is none."""
    try:
        # Behind its name, which may hold anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "X", 0
    return state, int(parent)
