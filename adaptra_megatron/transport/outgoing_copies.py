# SPDX-License-Identifier: Apache-2.0
"""Messages on their way from a device into page-locked host memory, part by part, while the training goes on.

The training thread records where in its stream the tensor is made and, if a buffer is at hand, puts the copies of all
parts on the copy stream, each followed by an event. A thread of this object sleeps on these events one after the
other: it tells the link's writing thread as soon as the first part is there, which then writes part i while the device
copies part i + 1. That thread also puts on the stream what had to wait for a buffer, in the order of staging.

A tensor is held until the device has read it, and no longer. So its memory needs no record_stream, which would keep it
from being used again until everything behind it on the copy stream is done, the next messages included.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from adaptra_megatron.transport.cuda_device import Computed, Device, Event, Stream, device_error
from adaptra_megatron.transport.pinned_pool import PinnedBuffer, PinnedPool

logger = logging.getLogger("adaptra_megatron.transport.outgoing_copies")

MOST_PARTS = 8
"""Each part costs a launch and an event on the training thread."""
SMALLEST_PART_NBYTES = 1 << 20
IDLE_S = 60.0


class OutgoingCopy:
    """One message; a `device_copies.Payload`. Holding it holds its page-locked buffer."""

    def __init__(
        self,
        tensor: torch.Tensor,
        computed: Event,
        parts: Sequence[tuple[int, int]],
        changed: threading.Condition,
        device: Device,
        link: str,
    ) -> None:
        self.shape: Sequence[int] = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self._source: torch.Tensor | None = tensor
        self._computed = computed
        self._parts = parts
        self._changed = changed
        self._device, self._link = device, link
        self._buffer: PinnedBuffer | None = None
        self._events: list[Event] = []
        self._landed_nbytes = 0
        self._failure: RuntimeError | None = None

    @property
    def ready(self) -> bool:
        return self._landed_nbytes >= self._parts[0][1] or self._failure is not None

    def parts(self) -> Sequence[tuple[int, int]]:
        return self._parts

    def address(self, end: int, deadline_s: float) -> int:
        with self._changed:
            while self._landed_nbytes < end:
                if self._failure is not None:
                    raise device_error(self._link, self._failure) from self._failure
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"link {self._link}: the device has not made or copied {end} bytes yet")
                self._changed.wait(left_s)
        return 0 if self._buffer is None else self._buffer.address

    def computed(self) -> Computed:
        with self._changed:
            source, buffer, failure = self._source, self._buffer, self._failure
        if failure is not None:
            raise device_error(self._link, failure) from failure
        if source is not None:
            return Computed(source, self._computed)
        assert buffer is not None
        try:
            return self._bring_back(buffer)
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause

    def _bring_back(self, buffer: PinnedBuffer) -> Computed:
        # Not on the copy stream, where messages may wait for computation.
        stream = self._device.new_stream()
        tensor = self._device.empty(self.shape, self.dtype, stream)
        self._device.copy(_bytes_of(tensor), buffer.memory[: self.nbytes], stream)
        # Waited for here, as this happens when a path has failed only: the buffer is then free to be let go of.
        self._device.record(stream).synchronize()
        return Computed(tensor, None)

    # What OutgoingCopies calls.

    @property
    def launched(self) -> bool:
        """Whether the device has been told to copy."""
        return self._buffer is not None

    def launch(self, stream: Stream, buffer: PinnedBuffer) -> None:
        """Put the copies of all parts on `stream`."""
        assert self._source is not None
        self._buffer = buffer
        source = _bytes_of(self._source)
        self._device.make_wait(stream, self._computed)
        for begin, end in self._parts:
            self._device.copy(buffer.memory[begin:end], source[begin:end], stream)
            self._events.append(self._device.record(stream))

    def await_part(self, number: int) -> None:
        """Sleep until the device has copied a part."""
        self._events[number].synchronize()
        if number + 1 == len(self._parts):
            self._source = None
            self._events.clear()

    def land(self, number: int) -> None:
        """The part is in host memory. The caller holds the lock."""
        self._landed_nbytes = self._parts[number][1]
        self._changed.notify_all()

    def fail(self, cause: RuntimeError) -> None:
        """It will not come. The caller holds the lock."""
        self._failure = cause
        self._changed.notify_all()

    def abandon(self, stream: Stream) -> None:
        """Let go of the tensor though the device may still read it."""
        if self._source is not None and self.launched:
            self._device.keep_until_done_on(self._source, stream)
        self._source = None


class OutgoingCopies:
    """All of one link. After an error of the device every message fails, with that error."""

    def __init__(
        self, device: Device, *, link: str, limit_nbytes: int, unit_nbytes: int, on_ready: Callable[[], None]
    ) -> None:
        """See `device_copies.DeviceCopies`."""
        self._device, self._link = device, link
        self._unit_nbytes = unit_nbytes
        self._on_ready = on_ready
        self._stream = device.new_stream()
        self._pool = PinnedPool(device.page_locked, limit_nbytes)
        self._changed = threading.Condition()
        self._under_way: deque[OutgoingCopy] = deque()
        self._failure: RuntimeError | None = None
        self._failure_untold = False
        self._closing = False
        self._thread = threading.Thread(target=self._follow_until_closed, name=f"adaptra-copy-{link}", daemon=True)
        self._thread.start()

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked memory that is used by messages."""
        return self._pool.used_nbytes

    def computed(self, tensor: torch.Tensor) -> Computed:
        """See `device_copies.Copies`."""
        try:
            return Computed(tensor, self._device.record(self._device.current_stream()))
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause

    def stage(self, message: Computed) -> OutgoingCopy:
        """See `device_copies.Copies`."""
        tensor = message.tensor
        try:
            computed = message.event or self._device.record(self._device.current_stream())
            copy = OutgoingCopy(tensor, computed, self._parts(tensor.nbytes), self._changed, self._device, self._link)
            with self._changed:
                if self._failure is None and copy.nbytes:
                    self._enqueue(copy)
        except RuntimeError as cause:
            self._fail(cause)
        if self._failure is not None:
            raise device_error(self._link, self._failure) from self._failure
        return copy

    def close(self, timeout_s: float) -> None:
        """Wait for the copies under way, at most `timeout_s`; see `device_copies.Copies`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._pool.close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("link %s: the device does not end its copies; their memory is left to it", self._link)

    def _enqueue(self, copy: OutgoingCopy) -> None:
        """The caller holds the lock."""
        # Behind one that waits for a buffer nothing may take one: it would be written later, so kept longer.
        first_come = not self._under_way or self._under_way[-1].launched
        self._under_way.append(copy)
        self._changed.notify_all()
        if first_come and (buffer := self._pool.unused(copy.nbytes)) is not None:
            copy.launch(self._stream, buffer)

    def _parts(self, nbytes: int) -> Sequence[tuple[int, int]]:
        size = max(SMALLEST_PART_NBYTES, -(-nbytes // MOST_PARTS))
        size = -(-size // self._unit_nbytes) * self._unit_nbytes
        return [(begin, min(begin + size, nbytes)) for begin in range(0, nbytes, size)] or [(0, 0)]

    def _follow_until_closed(self) -> None:
        while True:
            with self._changed:
                while not self._under_way and not self._failure_untold:
                    if self._closing:
                        return
                    self._changed.wait(IDLE_S)
                untold, self._failure_untold = self._failure_untold, False
                copy = self._under_way[0] if self._under_way else None
            if untold:
                self._on_ready()
            if copy is not None:
                self._follow_to_its_end(copy)
            del copy  # or an idle thread would hold the last buffer

    def _follow_to_its_end(self, copy: OutgoingCopy) -> None:
        try:
            followed = self._follow(copy)
        except RuntimeError as cause:
            self._fail(cause)
            return
        with self._changed:
            if not followed:
                self._under_way.clear()
            elif self._under_way and self._under_way[0] is copy:
                self._under_way.popleft()

    def _follow(self, copy: OutgoingCopy) -> bool:
        """False if there was no buffer before close()."""
        if not copy.launched:
            buffer = self._pool.get(copy.nbytes)
            if buffer is None:
                return False
            with self._changed:  # or a later one's wait could come between its parts
                copy.launch(self._stream, buffer)
        for number in range(len(copy.parts())):
            copy.await_part(number)
            with self._changed:
                copy.land(number)
            if number == 0:
                self._on_ready()
        return True

    def _fail(self, cause: RuntimeError) -> None:
        """Every copy under way fails: after an error of its own a device answers all that follows with it."""
        with self._changed:
            self._failure = self._failure or cause
            self._failure_untold = True
            failed = list(self._under_way)
            self._under_way.clear()
            for copy in failed:
                copy.fail(cause)
            self._changed.notify_all()
        for copy in failed:
            self._abandon(copy)

    def _abandon(self, copy: OutgoingCopy) -> None:
        try:
            copy.abandon(self._stream)
        except RuntimeError as error:
            logger.debug("link %s: a tensor is let go of on a failed device: %s", self._link, error)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not by reshape alone: a contiguous tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
