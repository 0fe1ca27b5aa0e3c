# SPDX-License-Identifier: Apache-2.0
"""The job's store for threads that are not to wait for it without end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class SilentStoreError(RuntimeError):
    """The job's store has not answered in time; says what stands still and what to do."""


class DeadlineStore:
    """A torch.distributed store every request of which is answered in time, or raises.

    Torch's own timeout is for values that are waited for: where the server's process stands still, or its host is cut
    off, a request waits for as long as that lasts. So another thread makes the requests, one at a time; it is left to
    itself where the store is silent, and from then on all requests raise.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        """`timeout_s`: of each request."""
        self._store, self._timeout_s = store, timeout_s
        self._silent = False
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(self._requests,), name="adaptra-store", daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the store's method of this name, which raises SilentStoreError, too."""
        method = getattr(self._store, name)

        def request(*arguments: Any) -> Any:
            return self._ask(lambda: method(*arguments))

        return request

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)

    def _ask(self, request: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((request(), None))
            except Exception as cause:
                answers.put((None, cause))

        if not self._silent:
            self._requests.put(answer)
        try:
            found, failure = answers.get(timeout=0.0 if self._silent else self._timeout_s)
        except queue.Empty:
            self._silent = True
            raise SilentStoreError(
                f"the job's store has not answered for {self._timeout_s:g} s (--adaptra-timeout-s): the process that "
                "serves it, the launcher of node rank 0, stands still, or its host cannot be reached; see to it, and "
                "restart from the last checkpoint"
            ) from None
        if failure is not None:
            raise failure
        return found


def _answer(requests: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (request := requests.get()) is not None:
        request()
