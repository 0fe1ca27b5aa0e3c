# SPDX-License-Identifier: Apache-2.0
"""The little of torch.cuda that copies between a GPU and host memory need, and nothing else of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.transport.message_keys import TransportError

_cuda: Any = torch.cuda  # most of it has no types
_current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # in builds for GPUs
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of this process."""
_NON_BLOCKING = 1
"""cudaStreamNonBlocking: the legacy default stream, on which training computes, is not waited for."""
_HIGHEST_PRIORITY = -(1 << 16)
"""CUDA takes what is out of range for the nearest that the device has."""

_CAPTURES_OF_THIS_THREAD = 1
"""cudaStreamCaptureModeThreadLocal: calls that no capture allows fail only where this thread captures."""

Stream = Any
"""Opaque here; torch.cuda.Stream on a GPU."""


class CudaEvent(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached it. Raises RuntimeError for an error of the device."""

    def synchronize(self) -> None:
        """Sleep until the device has reached it, other threads going on. Raises RuntimeError likewise."""


class Computed(NamedTuple):
    """A tensor, and the event after what made it, to be waited for before another stream, or thread, uses it."""

    tensor: torch.Tensor
    event: CudaEvent | None
    """None where it is done already, as in host memory."""


def is_computed(message: Computed) -> bool:
    """Return whether a tensor is there. Never waits; a device that failed has no more to do for it."""
    try:
        return message.event is None or message.event.query()
    except RuntimeError:
        return True


class Device(Protocol):
    """A device with streams. Every method may be called by any thread, and raises RuntimeError when the device does."""

    @property
    def device(self) -> torch.device:
        """Return where its tensors are."""

    def current_stream(self) -> Stream:
        """Return what the calling thread computes on."""

    @property
    def memory_stream(self) -> Stream:
        """The stream that memory of received tensors is allocated on. Nothing ever runs on it: so memory that one link
        is done with serves any other at once, and whatever else uses a tensor is to keep it until it is done there."""

    def new_stream(self) -> Stream:
        """A stream of its own, which waits for no other. It lasts as long as the process."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within, the calling thread computes on `stream`."""

    def handle(self, stream: Stream) -> int:
        """The stream as a number, a cudaStream_t, for libraries."""

    def current_handle(self) -> int:
        """That of `current_stream`."""

    def record(self, stream: Stream, unused: CudaEvent | None = None) -> CudaEvent:
        """An event at the present end of `stream`, which tells no time; `unused`: one to use again."""

    def make_wait(self, stream: Stream, event: CudaEvent) -> None:
        """What is put on `stream` from now on runs after `event`. Returns at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Put a copy on `stream`. Returns at once if the side in host memory is page-locked."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None) -> torch.Tensor:
        """Device memory that may be used on `stream` at once; None: on the current one."""

    def keep_until_done_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of `tensor`, once freed, is not used again before what is on `stream` by then is done."""

    def idle(self, stream: Stream) -> bool:
        """Return whether all that was put on `stream` is done."""

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
        self._memory_stream = self.new_stream()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def memory_stream(self) -> Stream:
        return self._memory_stream

    def current_stream(self) -> Stream:
        return _cuda.current_stream(self._device)

    def new_stream(self) -> Stream:
        # torch.cuda.Stream is one of 32 that all libraries of the process are dealt in turn: what the others put on it
        # would come first, a receive that never ends included. It is not destroyed: torch's allocator may still record
        # events on it for memory that was used there.
        made = ctypes.c_void_p()
        with _cuda.device(self._device):
            status = cuda_runtime().cudaStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, _HIGHEST_PRIORITY)
        _check(status, "cudaStreamCreateWithPriority")
        return _cuda.ExternalStream(made.value, device=self._device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _cuda.stream(stream)
        return context

    def handle(self, stream: Stream) -> int:
        return int(stream.cuda_stream)

    def current_handle(self) -> int:
        return int(_current_raw_stream(self._device.index))

    def record(self, stream: Stream, unused: CudaEvent | None = None) -> CudaEvent:
        # blocking: a thread that synchronizes sleeps instead of spinning on a core that training needs.
        event: CudaEvent = unused if unused is not None else _cuda.Event(blocking=True, enable_timing=False)
        event.record(stream)  # type: ignore[attr-defined]
        return event

    def make_wait(self, stream: Stream, event: CudaEvent) -> None:
        stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with _cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None) -> torch.Tensor:
        if stream is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
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


def device_of(tensors: torch.device) -> CudaDevice | None:
    """The device that tensors are on; None where that is the CPU. Raises ValueError for what is neither CPU nor GPU."""
    if tensors.type == "cpu":
        return None
    if tensors.type != "cuda":
        raise ValueError(f"the host path carries tensors of CPUs and GPUs, not of {tensors}")
    return CudaDevice(tensors)


class DeviceThread(threading.Thread):
    """A thread of ours that asks something of a device: a CUDA graph that another one captures is not broken by it.

    In the mode that a thread begins with, most of what it asks spoils any capture in the process (pytorch#104487).
    """

    def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        if _cuda.is_initialized() and (runtime := cuda_runtime()) is not None:
            mode = ctypes.c_int(_CAPTURES_OF_THIS_THREAD)
            status = runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            _check(status, "cudaThreadExchangeStreamCaptureMode")
        super().run()


def cuda_runtime() -> Any:
    """The CUDA runtime that torch has loaded, by its soname; torch lacks some bindings. None: it is one for CPUs, or
    there is no GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def _check(status: Any, function: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{function} failed with CUDA error {int(status)}")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 [nbytes]."""
    # Not by reshape alone: a contiguous tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


OutOfMemory: type[Exception] = torch.OutOfMemoryError


def out_of_memory(link: str, cause: Exception) -> TransportError:
    """The error for a received message that found no room on the device."""
    return TransportError(
        f"link {link}: the device has no memory left for a received message: {' '.join(str(cause).split())}. Received "
        "messages have a share of the memory of their own, beside what training has cached. Lower "
        "--adaptra-max-in-flight, or --adaptra-memory-fraction where the cap is measured; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets cached memory serve both"
    )


def device_error(link: str, cause: Exception) -> TransportError:
    """The error for copies that `cause` ended."""
    if isinstance(cause, OutOfMemory):
        return out_of_memory(link, cause)
    return TransportError(
        f"link {link}: copying between the device and host memory failed; the device reported: {cause}. Look for the "
        "first error of that device in this process's log; restart from the last checkpoint, with "
        "CUDA_LAUNCH_BLOCKING=1 if the error does not say what caused it: messages then go by the host path alone"
    )
