# SPDX-License-Identifier: Apache-2.0
"""Run a program that Linux kills when its parent ends, however that ends.

    python -I -S tied_process.py PARENT_PID PROGRAM ARGUMENTS...

It is started as a file, by an interpreter that imports nothing else, so that it costs a rank only milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127
"""Exit status for a missing program, as a shell's."""


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when `parent` ends; more exactly, the thread of `parent` that started this
    process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Replace this process by the program."""
    die_with_parent(int(arguments[0]))
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as cause:
        sys.stderr.write(f"adaptra launch: cannot run {arguments[1]}: {cause.strerror}\n")
        os._exit(_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
