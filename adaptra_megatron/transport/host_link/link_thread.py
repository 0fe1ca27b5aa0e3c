# SPDX-License-Identifier: Apache-2.0
"""Run code that releases the lock of one end of a link for a while: its threads, and callers that do a thread's work.

A link holds its lock while it serves a caller or calls its parts, unless a docstring says otherwise. Only this module
runs slow operations without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

Result = TypeVar("Result")
Work = Callable[[], Callable[[], Result] | None]
"""Work to do without the lock. Returns what to call with the lock afterwards, or None."""


def without(lock: threading.Lock, work: Work[Result]) -> Result | None:
    """Call `work` without the lock, then its result with the lock; return the latter's result."""
    lock.release()
    try:
        settle = work()
    finally:
        lock.acquire()
    return None if settle is None else settle()


class LinkThread:
    """Thread that asks for its next work with the lock held. Callers hold the lock, unless a method says otherwise."""

    def __init__(self, lock: threading.Lock, name: str, next_work: Callable[[], Work[object] | float | None]) -> None:
        """`next_work` returns work, the longest time to sleep in seconds, or None to end."""
        self._lock, self._next_work = lock, next_work
        self._to_do = threading.Condition(lock)
        self._thread = DeviceThread(self._run, name)

    def start(self) -> None:
        """Start the thread. With or without the lock."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, if it was started. Without the lock."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Wake the thread: there may be work, an earlier time to wake up, or the link closes."""
        self._to_do.notify()

    def _run(self) -> None:
        with self._lock:
            while (work := self._next_work()) is not None:
                if isinstance(work, float):
                    self._to_do.wait(work)
                else:
                    without(self._lock, work)
