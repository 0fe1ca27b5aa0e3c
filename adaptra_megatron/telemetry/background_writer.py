# SPDX-License-Identifier: Apache-2.0
"""Write files of a run in a thread, so that the training never waits for a disk. Refuse special files."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from adaptra_megatron.common.child_process import OwningProcess
from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)


def is_no_file(path: Path) -> bool:
    """Return whether `path` exists and is no regular file, such as a FIFO, on which a read would hang. A missing file
    is left to `open`."""
    return path.exists() and not path.is_file()


Item = TypeVar("Item")


class BackgroundWriter(Generic[Item]):
    """Queues items for `consume`, which runs in a thread of its own and writes them anywhere.

    Neither `put` nor `close` raises, and `put` never blocks. If `consume` raises OSError, TypeError or ValueError, or
    falls `limit` items behind, one warning is logged and all later items are dropped. Queued items are written when
    the process exits normally, and lost when it is killed.
    """

    def __init__(self, what: str, consume: Callable[[Iterator[Item]], None], *, limit: int) -> None:
        """Start the thread. `what` completes the warning "no more ...". `consume` gets an iterator that ends at
        `close`."""
        self._what = what
        self._consume = consume
        self._limit = limit
        self._queue: queue.Queue[tuple[Item] | None] = queue.Queue(limit)
        self._failed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="adaptra-writer", daemon=True)
        self._thread.start()
        self._owner = OwningProcess()
        atexit.register(self.close)

    @property
    def failed(self) -> bool:
        """Whether writing has stopped because of an error, which was logged."""
        return self._failed.is_set()

    def put(self, item: Item) -> None:
        """Queue an item; returns at once. Does nothing after a failure or after `close`."""
        if self._closed or self.failed:
            return
        try:
            self._queue.put_nowait((item,))
        except queue.Full:
            self._fail(f"{self._limit} entries wait for the disk")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if not self._owner.is_this:
            return
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._fail(f"{self._limit} entries wait for the disk at the end of training")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"the disk took more than {timeout_s:g} s for the last entries")

    def _items(self) -> Iterator[Item]:
        while (entry := self._queue.get()) is not None and not self.failed:
            yield entry[0]

    def _run(self) -> None:
        try:
            self._consume(self._items())
        except (OSError, TypeError, ValueError) as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            logger.warning("no more %s (%s); training goes on", self._what, reason)
