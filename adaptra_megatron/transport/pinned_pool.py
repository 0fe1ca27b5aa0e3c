# SPDX-License-Identifier: Apache-2.0
"""Page-locked host buffers for messages that leave a device: bounded, and used again, for making one costs more than
the copy into it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable

import torch

SMALLEST_NBYTES = 1 << 16
IDLE_S = 1.0
"""How often a thread that waits for a buffer looks whether the pool was closed, should it not be told."""


class PinnedBuffer:
    """Goes back to its pool when the last holder lets go, as a tensor's memory does."""

    def __init__(self, memory: torch.Tensor, returned: queue.SimpleQueue[torch.Tensor | None]) -> None:
        self.memory = memory
        """uint8, at least as many bytes as were asked for."""
        self._returned = returned

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.memory.data_ptr()

    def __del__(self) -> None:
        # The one kind of queue that may be used where a garbage collection can come in between (see its put()).
        self._returned.put(self.memory)


class PinnedPool:
    """At most `limit_nbytes`, used or not; one buffer always may be there, however large."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], limit_nbytes: int) -> None:
        """`allocate`: page-locked uint8 [nbytes]."""
        self._allocate = allocate
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._returned: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._unused: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._unused_nbytes = 0
        self._used_nbytes = 0
        self._closed = False

    def unused(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer that is there already, if one is. Never takes long."""
        with self._lock:
            self._take_back()
            return self._reuse(_size_class(nbytes))

    def get(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer, waiting until others have come back if need be. None once the pool is closed.

        For one thread only. Raises RuntimeError when page-locked memory cannot be had.
        """
        size = _size_class(nbytes)
        while not self._closed:
            with self._lock:
                self._take_back()
                found = self._reuse(size)
                if found is not None:
                    return found
                room = self._make_room(size)
                if room:
                    self._used_nbytes += size
            if room:
                return self._make(size)
            with contextlib.suppress(queue.Empty):
                memory = self._returned.get(timeout=IDLE_S)
                with self._lock:
                    self._keep(memory)
        return None

    def close(self) -> None:
        """Have `get` return; memory is freed as it comes back. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._unused.clear()
            self._unused_nbytes = 0
        self._returned.put(None)

    @property
    def used_nbytes(self) -> int:
        """Held by somebody."""
        with self._lock:
            self._take_back()
            return self._used_nbytes

    @property
    def nbytes(self) -> int:
        """Used or not."""
        with self._lock:
            return self._used_nbytes + self._unused_nbytes

    def _make(self, size: int) -> PinnedBuffer:
        try:
            return PinnedBuffer(self._allocate(size), self._returned)
        except RuntimeError:
            with self._lock:
                self._used_nbytes -= size
            raise

    # The caller of these holds the lock.

    def _take_back(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._keep(self._returned.get_nowait())

    def _keep(self, memory: torch.Tensor | None) -> None:
        if memory is None:
            return
        self._used_nbytes -= memory.nbytes
        if not self._closed:
            self._unused[memory.nbytes].append(memory)
            self._unused_nbytes += memory.nbytes

    def _reuse(self, size: int) -> PinnedBuffer | None:
        if not self._unused[size]:
            return None
        self._unused_nbytes -= size
        self._used_nbytes += size
        return PinnedBuffer(self._unused[size].pop(), self._returned)

    def _make_room(self, size: int) -> bool:
        """Whether a buffer of `size` may be made; unused ones of other sizes give way."""
        if self._used_nbytes and self._used_nbytes + size > self._limit_nbytes:
            return False
        for other in sorted(self._unused, reverse=True):
            while self._unused[other] and self._used_nbytes + self._unused_nbytes + size > self._limit_nbytes:
                self._unused[other].pop()
                self._unused_nbytes -= other
        return True


def _size_class(nbytes: int) -> int:
    # torch's own allocator of page-locked memory makes powers of two of all sizes anyway.
    return max(SMALLEST_NBYTES, 1 << (nbytes - 1).bit_length())
