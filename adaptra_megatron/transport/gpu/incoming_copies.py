# SPDX-License-Identifier: Apache-2.0
"""Copy received messages from host memory to a device.

A message whose receive was posted before it began to arrive is copied part by part, directly from the ring, by the
thread that reads the ring. A thread of this object releases each slot once the device has read it. Slots never wait for
the training, so the ring does not stall. Any other message is assembled in host memory first, and copied when its
receive is posted: so the device holds no more received messages than with receives of torch.distributed. The training
thread's `take` makes its stream wait for the copy's event, and does not wait itself.

Received tensors have a share of the device's memory of their own, because a copy would otherwise have to wait: memory
that computation has just freed may still be in use by queued work. In return, a received tensor must be kept until the
computation that uses it has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Event as RingEvent
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.gpu.cuda_device import CudaEvent, Device, DeviceThread, bytes_of, device_error
from adaptra_megatron.transport.gpu.page_locks import PageLocks, RingPages

logger = logger_of(__name__)

IDLE_S = 60.0


class IncomingCopy:
    """A received message, whole or in parts; a `copies.Receipt`."""

    def __init__(self, copies: IncomingCopies, host: torch.Tensor | None) -> None:
        """`host`: the whole message in host memory; None: it arrives in parts."""
        self.missing_nbytes = 0
        """Bytes of parts that have not arrived."""
        self.tensor: torch.Tensor | None = None
        self.copied: CudaEvent | None = None
        self.failure: RuntimeError | None = None
        self._copies, self._host = copies, host
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._host is None:
                return
            host, self._host = self._host, None
            try:
                self.tensor, self.copied = self._copies.launch(host)
            except RuntimeError as cause:
                self.failure = cause

    def take(self) -> torch.Tensor:
        self.begin()
        if self.failure is not None:
            raise device_error(self._copies.link, self.failure) from self.failure
        assert self.tensor is not None
        assert self.copied is not None
        tensor, self.tensor = self.tensor, None
        self._copies.hand_over(tensor, self.copied)
        return tensor


class _UnderWay(NamedTuple):
    """A copy in progress."""

    copied: CudaEvent
    held: tuple[torch.Tensor, torch.Tensor]
    """Tensors that the copy reads and writes."""
    part: tuple[Ring, int, int] | None
    """(ring, first slot, slots) that the copy reads; None for a whole message."""
    last: bool
    """True if the copy completes the message: its receipt uses the event."""


class IncomingCopies:
    """All incoming copies of one link."""

    def __init__(self, device: Device, *, link: str, locks: PageLocks) -> None:
        self.link = link
        self._device, self._locks = device, locks
        self._stream = device.new_stream()
        self._pages = RingPages(device, self._stream, locks)
        self._coming: dict[int, IncomingCopy] = {}
        """Messages of which parts have arrived, by sequence number. Guarded, as all parts, by
        `self._pages.launching`."""
        self._changed = threading.Condition()
        self._under_way: deque[_UnderWay] = deque()
        self._unused_events: list[CudaEvent] = []
        self._closing = False
        self._thread = DeviceThread(self._release_until_closed, f"adaptra-copied-{link}")
        self._thread.start()

    def use_ring(self, ring: Ring) -> None:
        """See `copies.Copies.use_rings`."""
        self._pages.use(ring)

    def receive(self, host: torch.Tensor, block_nbytes: int) -> IncomingCopy:
        """See `copies.Copies`."""
        copy = IncomingCopy(self, host)
        if host.nbytes and not self._locks.lock(host.data_ptr(), block_nbytes):
            # From pageable memory a copy takes the thread that asks for it: let it be this one, which holds no lock.
            copy.begin()
        return copy

    def receive_part(self, part: RingEvent, dtype: torch.dtype, ring: Ring) -> IncomingCopy | None:
        """See `copies.Copies`."""
        with self._pages.launching:
            copy = self._coming.get(part.sequence)
            if copy is None:
                copy = self._coming[part.sequence] = IncomingCopy(self, None)
                copy.missing_nbytes = part.total_nbytes
            copy.missing_nbytes -= part.nbytes
            try:
                if copy.failure is None:
                    self._launch_part(copy, part, dtype, ring)
            except RuntimeError as cause:
                copy.failure = cause
            if copy.failure is not None:
                ring.release_frames(part.first_slot, part.slots)
            if copy.missing_nbytes:
                return None
            return self._coming.pop(part.sequence)

    def launch(self, host: torch.Tensor) -> tuple[torch.Tensor, CudaEvent]:
        """Enqueue the copy of a whole message; its host memory is held until the copy is done."""
        tensor = self._device.empty(host.shape, host.dtype, self._device.memory_stream)
        if host.nbytes:
            self._device.copy(tensor, host, self._stream)
        copied = self._device.record(self._stream)
        self._follow(_UnderWay(copied, (host, tensor), None, last=True))
        return tensor, copied

    def hand_over(self, tensor: torch.Tensor, copied: CudaEvent) -> None:
        """Make the current stream wait for `tensor`, and the reuse of its memory wait for the current stream."""
        try:
            # The stream that computes, not the thread: the host may then launch ahead, as with a receive of NCCL.
            stream = self._device.current_stream()
            self._device.make_wait(stream, copied)
            self._device.keep_until_done_on(tensor, stream)
        except RuntimeError as cause:
            raise device_error(self.link, cause) from cause

    def close(self, timeout_s: float) -> bool:
        """Wait for copies in progress, at most `timeout_s`. Returns False if the device may still read host memory."""
        drained = self._pages.use(None, timeout_s)
        if not drained:
            logger.warning("link %s: device copies did not finish; their pinned buffers stay allocated", self.link)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return drained

    def _launch_part(self, copy: IncomingCopy, part: RingEvent, dtype: torch.dtype, ring: Ring) -> None:
        device, last = self._device, copy.missing_nbytes == 0
        if copy.tensor is None:
            copy.tensor = device.empty(part.shape, dtype, device.memory_stream)
        _header, payload = ring.slot_offsets(part.first_slot)
        source = torch.frombuffer(ring, dtype=torch.uint8)[payload : payload + part.nbytes]
        device.copy(bytes_of(copy.tensor)[part.offset : part.offset + part.nbytes], source, self._stream)
        unused = self._unused_events.pop() if self._unused_events and not last else None
        copied = device.record(self._stream, unused)
        if last:
            copy.copied = copied
        self._follow(_UnderWay(copied, (source, copy.tensor), (ring, part.first_slot, part.slots), last))

    def _follow(self, copy: _UnderWay) -> None:
        with self._changed:
            self._under_way.append(copy)
            self._changed.notify()

    def _release_until_closed(self) -> None:
        while True:
            with self._changed:
                while not self._under_way:
                    if self._closing:
                        return
                    self._changed.wait(IDLE_S)
                copy = self._under_way.popleft()
            try:
                copy.copied.synchronize()
            except RuntimeError as error:  # what takes the message meets it, too
                logger.debug("link %s: a copy to a failed device: %s", self.link, error)
            if copy.part is not None:
                ring, first_slot, slots = copy.part
                ring.release_frames(first_slot, slots)
            if not copy.last:
                self._unused_events.append(copy.copied)
            del copy  # or an idle thread would hold the last message
