# SPDX-License-Identifier: Apache-2.0
"""What comes out of a ring, for an event loop: taken there as long as there is something, awaited on a thread if not.

Waking a thread for each slot would cost more than what is done with the slot.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from adaptra_megatron.transport._ring import FrameError, Ring, RingError

Item = TypeVar("Item")
_LOOK_S = 60.0
"""How long the thread sleeps where no signal wakes it."""
_JOIN_S = 1.0
"""How long the event loop stands still at most for a thread that has nothing left to do."""


class RingWatch(Generic[Item]):
    """One side of a ring. Everything but the waiting happens in the event loop that it was made in."""

    def __init__(self, ring: Ring, get: Callable[[float], Item | None], came: Callable[[], None]) -> None:
        """`get` waits in the ring until a deadline; `came` is called when it is time to `pull` after a `watch`."""
        self.over = False
        """The ring is closed, and all that was in it has been pulled."""
        self._ring, self._get, self._came = ring, get, came
        self._loop = asyncio.get_running_loop()
        self._found: list[Item] = []
        self._error: RingError | FrameError | None = None
        self._waiting = False
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"verbs-{get.__name__}", daemon=True)
        self._thread.start()

    def pull(self) -> list[Item]:
        """All that is there now. Raises RingError, FrameError: the training process spoilt its ring."""
        if self._error is not None:
            raise self._error
        if self._waiting:
            return []  # a ring gives to one at a time
        items, self._found = self._found, []
        closed = self._ring.closed
        while (item := self._get(0.0)) is not None:
            items.append(item)
        self.over = closed
        return items

    def watch(self) -> None:
        """Have `came` called as soon as there is something, or the ring is closed."""
        if not self._waiting and not self.over:
            self._waiting = True
            self._orders.put(True)

    async def stop(self) -> None:
        """Returns when the thread has ended. The ring is closed already, or the thread would go on waiting."""
        self._orders.put(False)
        await asyncio.wait([self._ended])  # which, unlike a bare await, leaves the future alone when it is cancelled
        self._thread.join(_JOIN_S)  # it has reported its end, and has only to return

    def _arrived(self, item: Item | None, error: RingError | FrameError | None) -> None:
        self._waiting, self._error = False, error
        if item is not None:
            self._found.append(item)
        self._came()

    def _run(self) -> None:
        while self._orders.get():
            item, error = None, None
            try:
                while item is None and not self._ring.closed:
                    item = self._get(time.monotonic() + _LOOK_S)
            except (RingError, FrameError) as cause:
                error = cause
            self._loop.call_soon_threadsafe(self._arrived, item, error)
        self._loop.call_soon_threadsafe(self._ended.set_result, None)
