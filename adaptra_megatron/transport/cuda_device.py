# SPDX-License-Identifier: Apache-2.0
"""The little of torch.cuda that copies between a GPU and host memory need, and nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.transport.messages import TransportError

_cuda: Any = torch.cuda  # most of it has no types
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of this process."""

Stream = Any
"""Opaque here; torch.cuda.Stream on a GPU."""


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has reached it. Raises RuntimeError for an error of the device."""

    def synchronize(self) -> None:
        """Sleep until the device has reached it, other threads going on. Raises RuntimeError likewise."""


class Computed(NamedTuple):
    """A tensor, and when what made it is done: whoever hands it to another stream, or thread, waits for that."""

    tensor: torch.Tensor
    event: Event | None
    """None where it is done already, as in host memory."""


def is_computed(message: Computed) -> bool:
    """Whether a tensor is there. Never waits; a device that failed has no more to do for it."""
    try:
        return message.event is None or message.event.query()
    except RuntimeError:
        return True


class Device(Protocol):
    """A device with streams. Every method may be called by any thread, and raises RuntimeError when the device does."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def current_stream(self) -> Stream:
        """What the calling thread computes on."""

    def new_stream(self) -> Stream:
        """A stream of its own, which waits for no other."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within, the calling thread computes on `stream`."""

    def record(self, stream: Stream) -> Event:
        """An event at the present end of `stream`."""

    def make_wait(self, stream: Stream, event: Event) -> None:
        """What is put on `stream` from now on runs after `event`. Returns at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Put a copy on `stream`. Returns at once if the side in host memory is page-locked."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Device memory that may be used on `stream` at once."""

    def keep_until_done_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of `tensor`, once freed, is not used again before what is on `stream` by then is done."""

    def idle(self, stream: Stream) -> bool:
        """Whether all that was put on `stream` is done."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8 [nbytes]."""

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that is there already. `address` is that of a page."""

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`; no copy may use the memory any more."""


class CudaDevice:
    """A GPU, through torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        # Without an index every thread would mean its own current device, which is GPU 0 in a new thread.
        index = _cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    @property
    def device(self) -> torch.device:
        return self._device

    def current_stream(self) -> Stream:
        return _cuda.current_stream(self._device)

    def new_stream(self) -> Stream:
        return _cuda.Stream(self._device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _cuda.stream(stream)
        return context

    def record(self, stream: Stream) -> Event:
        # blocking: a thread that synchronizes sleeps instead of spinning on a core that training needs.
        event: Event = _cuda.Event(blocking=True)
        event.record(stream)  # type: ignore[attr-defined]
        return event

    def make_wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with _cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        with _cuda.stream(stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def keep_until_done_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def idle(self, stream: Stream) -> bool:
        return bool(stream.query())

    def page_locked(self, nbytes: int) -> torch.Tensor:
        with _cuda.device(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def lock_pages(self, address: int, nbytes: int) -> None:
        with _cuda.device(self._device):
            _check(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE), "cudaHostRegister")

    def unlock_pages(self, address: int) -> None:
        with _cuda.device(self._device):
            _check(_cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")


def _check(status: Any, function: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{function} failed with CUDA error {int(status)}")


def device_error(link: str, cause: Exception) -> TransportError:
    """The error for copies that `cause` ended."""
    return TransportError(
        f"link {link}: copying between the device and host memory failed; the device reported: {cause}. Look for the "
        "first error of that device in this process's log; restart from the last checkpoint, with "
        "CUDA_LAUNCH_BLOCKING=1 if the error does not say what caused it"
    )
