# SPDX-License-Identifier: Apache-2.0
"""Page-locks the memory that messages are received into, so that a device copies from it by itself.

The alternative, a copy into page-locked buffers first, costs as much as taking the message out of the ring, on the
thread that does that. Locking a block costs more than such a copy, but only once: the inbox uses its blocks again.
"""

from __future__ import annotations

import logging
import threading

import torch

from adaptra_megatron.transport.cuda_device import Device

logger = logging.getLogger("adaptra_megatron.transport.page_locks")

PAGE_NBYTES = 4096


class PageLocks:
    """Of one inbox, which must begin its blocks at pages and not unmap one before `close`: the kernel would give the
    addresses to other memory, which the device would take for locked. An inbox keeps its blocks if its `pooled_nbytes`
    is without limit; they are then as many as were ever in use at once.
    """

    def __init__(self, device: Device, link: str) -> None:
        self._device, self._link = device, link
        self._lock = threading.Lock()
        self._locked: dict[int, int] = {}
        self._refused = False

    def lock(self, message: torch.Tensor) -> bool:
        """Whether all of a received message (host memory, contiguous, at the beginning of its block) is locked now.

        False where the system refuses; that is said once, and from then on every copy is a slower one.
        """
        address, nbytes = message.data_ptr(), -(-message.nbytes // PAGE_NBYTES) * PAGE_NBYTES
        with self._lock:
            if self._locked.get(address, 0) >= nbytes:
                return True
            if self._refused or nbytes == 0:
                return False
            try:
                # A smaller message was in this block before; nothing is copied from it while it holds a new one.
                if self._locked.pop(address, 0):
                    self._device.unlock_pages(address)
                self._device.lock_pages(address, nbytes)
            except RuntimeError as cause:
                self._refused = True
                logger.warning(
                    "link %s: received messages cannot be page-locked (%s); their copies to the device are slower",
                    *(self._link, cause),
                )
                return False
            self._locked[address] = nbytes
            return True

    @property
    def nbytes(self) -> int:
        """Locked at present."""
        with self._lock:
            return sum(self._locked.values())

    def close(self) -> None:
        """Unlock everything; no copy may be under way. Safe to call twice."""
        with self._lock:
            self._refused = True
            locked, self._locked = self._locked, {}
        for address in locked:
            try:
                self._device.unlock_pages(address)
            except RuntimeError as error:
                logger.debug("link %s: memory stays page-locked on a failed device: %s", self._link, error)
