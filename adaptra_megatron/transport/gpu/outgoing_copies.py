# SPDX-License-Identifier: Apache-2.0
"""Copy messages from a device into a link's ring, part by part, while the training continues.

The training thread only records an event behind a tensor's computation. A thread of this object sleeps until the device
reaches it, message after message, and wakes the link's writing thread. That thread claims slots, has the device copy
into them, and publishes each part when its copy is complete, while the next part is copied and the previous one is
sent.

No slot is claimed before the tensor is computed: slots are published in the order of claiming, and all other traffic of
the ring, above all acknowledgements, must not wait for computation.

A tensor is held until the peer has acknowledged it, as it may have to be sent again through another ring. By then the
device has read it, so record_stream is not needed for its memory. record_stream would keep the memory until all later
work on the copy stream is complete, including the next messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Description, Ring
from adaptra_megatron.transport.gpu.cuda_device import Computed, CudaEvent, Device, DeviceThread, bytes_of, device_error
from adaptra_megatron.transport.gpu.page_locks import PageLocks, RingPages
from adaptra_megatron.transport.message_keys import TransportError

logger = logger_of(__name__)

PARTS_OF_RING = 4
"""Largest part, as a fraction of the ring: some parts are copied while others are sent."""
COPIED_AT_ONCE = 2
"""Parts in progress: one is copied while the thread wakes up for the one before."""
IDLE_S = 60.0


class OutgoingCopy:
    """A message to send; a `copies.Payload`. Keeps the tensor alive."""

    inline = False  # the writing thread sleeps while the device copies

    def __init__(self, message: Computed, copies: OutgoingCopies) -> None:
        self.shape: Sequence[int] = tuple(message.tensor.shape)
        self.dtype = message.tensor.dtype
        self.nbytes = message.tensor.nbytes
        self.ready = message.event is None
        self.message = message
        self._copies = copies

    def write(self, ring: Ring, description: Description, deadline_s: float, offset: int = 0) -> int:
        self._copies.write(self.message.tensor, ring, description, deadline_s)
        return self.nbytes + 1


class _Part(NamedTuple):
    """Ring slots that one device copy fills, and the event behind that copy."""

    first_slot: int
    slots: int
    offset: int
    copied: CudaEvent


class OutgoingCopies:
    """All outgoing copies of one link. Once the device has failed, every message fails with its error."""

    def __init__(self, device: Device, *, link: str, locks: PageLocks, on_ready: Callable[[], None]) -> None:
        """See `device_copies.DeviceCopies`."""
        self._device, self._link = device, link
        self._on_ready = on_ready
        self._stream = device.new_stream()
        self._pages = RingPages(device, self._stream, locks)
        self._unused_events: list[CudaEvent] = []
        self._changed = threading.Condition()
        self._uncomputed: deque[OutgoingCopy] = deque()
        self._failure: RuntimeError | None = None
        self._closing = False
        self._thread = DeviceThread(self._follow_until_closed, f"adaptra-computed-{link}")
        self._thread.start()

    def use_ring(self, ring: Ring) -> None:
        """See `copies.Copies.use_rings`."""
        self._pages.use(ring)

    def computed(self, tensor: torch.Tensor) -> Computed:
        """See `copies.Copies`."""
        try:
            return Computed(tensor, self._device.record(self._device.current_stream()))
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause

    def stage(self, message: Computed) -> OutgoingCopy:
        """See `copies.Copies`."""
        self.check()
        copy = OutgoingCopy(message, self)
        if not copy.ready:
            with self._changed:
                self._uncomputed.append(copy)
                self._changed.notify()
        return copy

    def check(self) -> None:
        """Raise TransportError if the device has failed."""
        if self._failure is not None:
            raise device_error(self._link, self._failure) from self._failure

    def write(self, tensor: torch.Tensor, ring: Ring, description: Description, deadline_s: float) -> None:
        """Write a message as `copies.Payload.write`; by one thread at a time."""
        self.check()
        if tensor.nbytes == 0:
            ring.write(description, 0, 0, deadline_s)
            return
        source, slots = bytes_of(tensor), torch.frombuffer(ring, dtype=torch.uint8)
        under_way: deque[_Part] = deque()
        offset = 0
        try:
            while offset < tensor.nbytes or under_way:
                part = None
                if offset < tensor.nbytes and len(under_way) < COPIED_AT_ONCE:
                    part = self._begin(source, slots, ring, offset, 0.0 if under_way else deadline_s)
                if part is not None:
                    under_way.append(part)
                    offset += part.slots * ring.slot_nbytes
                else:
                    self._await(under_way[0].copied)
                    done = under_way.popleft()
                    ring.commit_frames(done.first_slot, done.slots, description, done.offset, tensor.nbytes)
        finally:
            for part in under_way:  # the ring is closed, or the device has failed: what comes behind them must not wait
                ring.commit_void(part.first_slot, part.slots)

    def close(self, timeout_s: float) -> bool:
        """Wait for copies in progress, at most `timeout_s`. Returns False if the device may still write host memory."""
        drained = self._pages.use(None, timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not drained or self._thread.is_alive():
            logger.warning("link %s: device work did not finish; its pinned buffers stay allocated", self._link)
        return drained

    def _begin(
        self, source: torch.Tensor, slots: torch.Tensor, ring: Ring, offset: int, deadline_s: float
    ) -> _Part | None:
        """Enqueue a copy into the free slots. Returns None if none is free and `deadline_s` is 0.

        Raises TimeoutError, RingClosedError, TransportError.
        """
        most = min(max(1, ring.slots // PARTS_OF_RING), -(-(source.nbytes - offset) // ring.slot_nbytes))
        first_slot, count = ring.claim_slots(most, deadline_s)
        if count == 0 and deadline_s:
            raise TimeoutError("the ring stayed full until the deadline")
        if count == 0:
            return None
        nbytes = min(count * ring.slot_nbytes, source.nbytes - offset)
        _header, payload = ring.slot_offsets(first_slot)
        try:
            with self._pages.launching:
                self._device.copy(slots[payload : payload + nbytes], source[offset : offset + nbytes], self._stream)
                unused = self._unused_events.pop() if self._unused_events else None
                return _Part(first_slot, count, offset, self._device.record(self._stream, unused))
        except RuntimeError as cause:
            ring.commit_void(first_slot, count)
            raise self._failed(cause) from cause

    def _await(self, copied: CudaEvent) -> None:
        try:
            copied.synchronize()
        except RuntimeError as cause:
            raise self._failed(cause) from cause
        self._unused_events.append(copied)

    def _failed(self, cause: RuntimeError) -> TransportError:
        self._failure = self._failure or cause
        return device_error(self._link, cause)

    def _follow_until_closed(self) -> None:
        while True:
            with self._changed:
                while not self._uncomputed:
                    if self._closing:
                        return
                    self._changed.wait(IDLE_S)
                copy = self._uncomputed.popleft()
            try:
                assert copy.message.event is not None
                copy.message.event.synchronize()
            except RuntimeError as cause:  # `write` raises it where the message's sending is waited for
                self._failed(cause)
            copy.ready = True
            self._on_ready()
            del copy  # or an idle thread would hold the last tensor
