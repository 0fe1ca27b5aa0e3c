# SPDX-License-Identifier: Apache-2.0
"""Page-locks host memory that is there already, so that a device copies into it and out of it by itself: rings, and the
memory of messages that arrive before they are asked for.

Locking costs more than copying a message, but once: an inbox uses its memory again, and a ring lasts for a session. It
may wait for all that the device does, so it is not for the training thread.
"""

from __future__ import annotations

import threading
import time

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.gpu.cuda_device import Device, Stream

logger = logger_of(__name__)

DRAIN_S = 1.0
"""How long a ring that is no longer used waits for the copies that are under way."""
_POLL_S = 0.001


class PageLocks:
    """Memory of one link, by address. It must stay mapped until it is unlocked: the kernel would give the addresses to
    other memory, which the device would take for locked. An inbox keeps its memory if its `pooled_nbytes` is without
    limit; that is then as much as was ever in use at once.
    """

    def __init__(self, device: Device, link: str) -> None:
        self._device, self._link = device, link
        self._lock = threading.Lock()
        self._locked: dict[int, int] = {}
        self._refused = False

    def lock(self, address: int, nbytes: int) -> bool:
        """Return whether whole pages from `address` on are locked now.

        False where the system refuses; that is said once, and from then on every copy is a slower one.
        """
        with self._lock:
            if self._refused or address in self._locked:
                return not self._refused
            try:
                self._device.lock_pages(address, nbytes)
            except RuntimeError as cause:
                self._refused = True
                logger.warning(
                    "link %s: host memory cannot be page-locked (%s): each message costs a copy on the CPU at this "
                    "end, by the driver and through its own buffers, and no two copies overlap",
                    *(self._link, cause),
                )
                return False
            self._locked[address] = nbytes
            return True

    def unlock(self, address: int) -> None:
        """Undo `lock`, if it was; no copy may be under way there."""
        with self._lock:
            if self._locked.pop(address, 0) == 0:
                return
        try:
            self._device.unlock_pages(address)
        except RuntimeError as error:
            logger.debug("link %s: memory stays page-locked on a failed device: %s", self._link, error)

    @property
    def nbytes(self) -> int:
        """Locked at present."""
        with self._lock:
            return sum(self._locked.values())

    def close(self) -> None:
        """Unlock everything; no copy may be under way. Safe to call twice."""
        with self._lock:
            self._refused = True
            locked = list(self._locked)
        for address in locked:
            self.unlock(address)


class RingPages:
    """The pages of the ring that one direction of a link uses: locked from the beginning of a session until the next.

    A thread that is late, and copies from a ring that is not used any more, finds its pages unlocked: it copies slowly.
    """

    def __init__(self, device: Device, stream: Stream, locks: PageLocks) -> None:
        """`stream`: that of all copies into, or out of, these rings."""
        self.launching = threading.Lock()
        """Held while a copy is put on the stream."""
        self._device, self._stream, self._locks = device, stream, locks
        self._ring: Ring | None = None
        self._left: list[Ring] = []
        """Still locked, so still mapped, for a device that does not end its copies."""

    def use(self, ring: Ring | None, drain_s: float = DRAIN_S) -> bool:
        """Change to another ring, or to none. False if copies are under way after `drain_s`: the pages stay locked."""
        if ring is not None:
            self._locks.lock(ring.slots_address, ring.slots_nbytes)
        with self.launching:
            drained = self._drain(drain_s)
            if self._ring is not None and drained:
                self._locks.unlock(self._ring.slots_address)
            elif self._ring is not None:
                self._left.append(self._ring)
            self._ring = ring
            return drained

    def _drain(self, drain_s: float) -> bool:
        deadline_s = time.monotonic() + drain_s
        try:
            while not self._device.idle(self._stream):
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError as error:
            logger.debug("a failed device copies nothing any more: %s", error)
        return True
