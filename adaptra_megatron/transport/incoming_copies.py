# SPDX-License-Identifier: Apache-2.0
"""Received messages on their way from host memory to a device.

The copy of a message is put on the copy stream as soon as it is both here and asked for; so the device has no more
received messages in its memory than if their receives had been posted with torch.distributed. The training thread's
`take` makes its stream wait for the copy's event, not itself.

The tensor comes from a share of the device's memory that only received tensors have, for there nothing has to be waited
for before the copy: memory that computation has just freed may still be in use by what is queued. In return its memory
must be kept, once freed, until computation that uses it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch

from adaptra_megatron.transport.cuda_device import Device, Event, device_error
from adaptra_megatron.transport.page_locks import PageLocks

logger = logging.getLogger("adaptra_megatron.transport.incoming_copies")

POLL_S = 0.001


class IncomingCopy:
    """One message; a `device_copies.Receipt`."""

    def __init__(self, host: torch.Tensor, copies: IncomingCopies) -> None:
        self._host: torch.Tensor | None = host
        self._copies = copies
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._copied: Event | None = None
        self._failure: RuntimeError | None = None

    def begin(self) -> None:
        with self._lock:
            if self._host is None:
                return
            host, self._host = self._host, None
            try:
                self._tensor, self._copied = self._copies.launch(host)
            except RuntimeError as cause:
                self._failure = cause

    def take(self) -> torch.Tensor:
        self.begin()
        if self._failure is not None:
            raise device_error(self._copies.link, self._failure) from self._failure
        assert self._tensor is not None
        assert self._copied is not None
        tensor, self._tensor = self._tensor, None
        self._copies.hand_over(tensor, self._copied)
        return tensor


class IncomingCopies:
    """All of one link."""

    def __init__(self, device: Device, *, link: str) -> None:
        self.link = link
        self._device = device
        self._stream = device.new_stream()
        self._page_locks = PageLocks(device, link)
        self._lock = threading.Lock()
        self._under_way: deque[tuple[torch.Tensor, Event]] = deque()
        """Host memory that the device reads, in the order of the copies."""

    def receive(self, host: torch.Tensor) -> IncomingCopy:
        """See `device_copies.Copies`."""
        self._let_go()
        copy = IncomingCopy(host, self)
        if host.nbytes and not self._page_locks.lock(host):
            # From pageable memory a copy takes the thread that asks for it: let it be this one, which holds no lock.
            copy.begin()
        return copy

    def launch(self, host: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Put the copy of a message on the copy stream; its host memory is held until that is done."""
        device, stream = self._device, self._stream
        with self._lock:
            tensor = device.empty(host.shape, host.dtype, device.memory_stream)
            if host.nbytes == 0:
                return tensor, device.record(stream)
            device.copy(tensor, host, stream)
            copied = device.record(stream)
            self._under_way.append((host, copied))
            return tensor, copied

    def hand_over(self, tensor: torch.Tensor, copied: Event) -> None:
        """Make the calling thread's current stream wait for `tensor`, and its memory wait for that stream."""
        try:
            stream = self._device.current_stream()
            self._device.make_wait(stream, copied)
            self._device.keep_until_done_on(tensor, stream)
        except RuntimeError as cause:
            raise device_error(self.link, cause) from cause

    def close(self, timeout_s: float) -> None:
        """Wait for the copies under way, at most `timeout_s`; see `device_copies.Copies`."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._device.idle(self._stream):
                if time.monotonic() >= deadline_s:
                    # What is locked stays locked, for the device may still read it.
                    logger.warning("link %s: the device does not end its copies; memory stays locked", self.link)
                    return
                time.sleep(POLL_S)
        except RuntimeError as error:
            logger.debug("link %s: closed on a failed device: %s", self.link, error)
        with self._lock:
            self._under_way.clear()
        self._page_locks.close()

    def _let_go(self) -> None:
        """Of host memory that the device has read."""
        with self._lock:
            try:
                while self._under_way and self._under_way[0][1].query():
                    self._under_way.popleft()
            except RuntimeError as error:
                logger.debug("link %s: host memory is kept for a failed device: %s", self.link, error)
