# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads or processes do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], otherwise: str | Callable[[], object] = "", limit_s: float = 20.0) -> Found:
    """Wait until `condition()` is true, and return it; an error that says `otherwise` after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(otherwise() if callable(otherwise) else otherwise or f"not within {limit_s} s")
        time.sleep(0.005)
    return found


def stop(process_id: int, number: signal.Signals = signal.SIGSTOP) -> None:
    """Stop a process, or end it, and wait until none of its threads runs.

    Linux wakes one thread for a SIGSTOP; until that has a core, all others go on, and answer requests.
    """

    def still() -> bool:
        try:
            stats = [each.read_text() for each in Path(f"/proc/{process_id}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return False
        return all(each.rpartition(")")[2].split()[0] in "TZX" for each in stats)

    os.kill(process_id, number)
    until(still, f"process {process_id} goes on after {number.name}")
