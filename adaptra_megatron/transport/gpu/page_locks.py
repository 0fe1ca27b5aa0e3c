# SPDX-License-Identifier: Apache-2.0
"""Page-lock existing host memory, so that a device can copy to and from it by DMA.

This is for rings, and for messages that arrive before their receive is posted. Locking costs more than copying a
message, but only once: an inbox reuses its memory, and a ring lasts for a session. It may wait for all pending work of
the device, so it is not for the training thread.
"""

from __future__ import annotations

import threading
import time

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.gpu.cuda_device import Device, Stream

logger = logger_of(__name__)

DRAIN_S = 1.0
"""Longest wait for copies in progress in a ring that is no longer used."""
_POLL_S = 0.001


class PageLocks:
    """Page-locked memory of one link, by address.

    Memory must stay mapped until it is unlocked: otherwise the kernel could reuse its addresses, which the device would
    still consider locked. So an inbox with unlimited `pooled_nbytes` keeps all memory that was ever used at once.
    """

    def __init__(self, device: Device, link: str) -> None:
        self._device, self._link = device, link
        self._lock = threading.Lock()
        self._locked: dict[int, int] = {}
        self._refused = False

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock whole pages from `address` on; return whether they are locked.

        A refusal by the system is logged once and makes later copies slower.
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
        """Unlock memory that `lock` locked. No copy may use it."""
        with self._lock:
            if self._locked.pop(address, 0) == 0:
                return
        try:
            self._device.unlock_pages(address)
        except RuntimeError as error:
            logger.debug("link %s: memory stays page-locked on a failed device: %s", self._link, error)

    @property
    def nbytes(self) -> int:
        """Bytes locked at present."""
        with self._lock:
            return sum(self._locked.values())

    def close(self) -> None:
        """Unlock everything. No copy may be in progress. May be called twice."""
        with self._lock:
            self._refused = True  # or a late message would lock pages for ever
            locked = list(self._locked)
        for address in locked:
            self.unlock(address)


class RingPages:
    """Page locks of the ring that one direction of a link uses, from the beginning of a session until the next.

    A late copy from an earlier ring finds its pages unlocked, and is slow.
    """

    def __init__(self, device: Device, stream: Stream, locks: PageLocks) -> None:
        """`stream`: stream of all copies into, or out of, these rings."""
        self.launching = threading.Lock()
        """Held while a copy is enqueued."""
        self._device, self._stream, self._locks = device, stream, locks
        self._ring: Ring | None = None
        self._left: list[Ring] = []
        """Former rings that are still locked, hence mapped: the device has not finished copies in them."""

    def use(self, ring: Ring | None, drain_s: float = DRAIN_S) -> bool:
        """Change to another ring, or to none. Returns False if copies are still in progress after `drain_s`; pages then
        stay locked.
        """
        if ring is not None:
            self._locks.lock(ring.slots_address, ring.slots_nbytes)
        # No new copy begins while the last ones end: a copy that is enqueued later would read unlocked, unmapped pages.
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
