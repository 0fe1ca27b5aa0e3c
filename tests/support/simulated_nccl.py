# SPDX-License-Identifier: Apache-2.0
"""ProcessGroupNCCL between simulated devices: transfers are kernels that stand still until the peer's is there."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from support.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream


class Wire:
    """What two ends share: messages on their way, in order. NCCL has no tags."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: deque[bytes] = deque()
        self.lost = False
        """Whether what is sent vanishes from now on."""


class SimulatedWork:
    """As WorkNCCL: a failed or aborted one is completed, too, and `wait` puts a wait on the current stream."""

    def __init__(self, group: SimulatedNccl, event: SimulatedEvent) -> None:
        self._group, self._event = group, event
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        """Lets the device work meanwhile."""
        self._group.device.run()
        return self.error is not None or self._event.done or self._group.aborted

    def wait(self) -> bool:
        """Raises what NCCL reported."""
        if self.error is not None:
            raise self.error
        device = self._group.device
        device.make_wait(device.current_stream(), self._event)
        return True


class _Receive(SimulatedEvent):
    """In a stream, an event that is waited for: done once the message has come, or the communicator is aborted."""

    def __init__(self, group: SimulatedNccl, address: int, nbytes: int) -> None:
        self._group, self._address, self._nbytes = group, address, nbytes
        self._over = False

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Looked at when the stream has come to it."""
        wire = self._group.wire
        if not self._over:
            with wire.lock:
                if wire.messages:
                    message = wire.messages.popleft()
                    assert len(message) == self._nbytes, "the two ends do not agree on the order of messages"
                    ctypes.memmove(self._address, message, self._nbytes)
                    self._over = True
        return self._over or self._group.aborted


class SimulatedNccl:
    """One end; made by a test's stand-in for `torch.distributed.ProcessGroupNCCL`."""

    class Options:
        """As torch's."""

        _timeout = timedelta(0)

    def __init__(self, device: SimulatedDevice, wire: Wire) -> None:
        self.device, self.wire = device, wire
        self.stream = device.new_stream()
        self.aborted = False
        self.threads: list[str] = []
        """That called."""
        self.environment = dict(os.environ)
        self.works: list[SimulatedWork] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimulatedWork:
        """Reads the tensor when the stream gets there."""
        (tensor,) = tensors
        address, nbytes = tensor.data_ptr(), tensor.nbytes

        def leave() -> None:
            with self.wire.lock:
                if not self.wire.lost:
                    self.wire.messages.append(ctypes.string_at(address, nbytes))

        return self._begin(leave)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimulatedWork:
        """Writes the next message into the tensor, whenever that comes."""
        (tensor,) = tensors
        receive = _Receive(self, tensor.data_ptr(), tensor.nbytes)
        self._wait_for_current()
        self.device.make_wait(self.stream, receive)
        return self._work()

    def abort(self) -> None:
        """Kernels exit."""
        self.aborted = True

    def _begin(self, kernel: Any) -> SimulatedWork:
        self._wait_for_current()
        self.device.put(self.stream, kernel)
        return self._work()

    def _wait_for_current(self) -> None:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self.threads.append(threading.current_thread().name)
        current: SimulatedStream = self.device.current_stream()
        self.device.make_wait(self.stream, self.device.record(current))

    def _work(self) -> SimulatedWork:
        self.works.append(SimulatedWork(self, self.device.record(self.stream)))
        return self.works[-1]
