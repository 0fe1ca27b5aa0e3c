# SPDX-License-Identifier: Apache-2.0
"""Wrap the few functions of torch.cuda that copies between a GPU and host memory need."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.message_keys import TransportError

logger = logger_of(__name__)

_cuda: Any = torch.cuda  # most of it has no types
_current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # in builds for GPUs
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of this process."""
_NON_BLOCKING = 1
"""cudaStreamNonBlocking: the stream does not synchronise with the legacy default stream, on which training computes."""
_HIGHEST_PRIORITY = -(1 << 16)
"""Below the valid range: CUDA uses the highest priority that the device has."""

_CAPTURES_OF_THIS_THREAD = 1
"""cudaStreamCaptureModeThreadLocal: calls that no capture allows fail only in a thread that captures."""

Stream = Any
"""Opaque here; torch.cuda.Stream on a GPU."""


class CudaEvent(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has passed the event. Raises RuntimeError if the device failed."""

    def synchronize(self) -> None:
        """Sleep, without the GIL, until the device has passed the event. Raises RuntimeError if the device failed."""


class Computed(NamedTuple):
    """A tensor and the event behind its computation, which other streams and threads must wait for."""

    tensor: torch.Tensor
    event: CudaEvent | None
    """Event behind the computation of the tensor; None: the tensor is complete, as in host memory."""


def is_computed(message: Computed) -> bool:
    """Return whether the tensor is complete, or its device has failed. Never waits."""
    try:
        return message.event is None or message.event.query()
    except RuntimeError:
        return True


class Device(Protocol):
    """Interface of a device with streams. For any thread; methods raise RuntimeError once the device has failed."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream."""

    @property
    def memory_stream(self) -> Stream:
        """Stream on which memory of received tensors is allocated. Nothing runs on it.

        So memory released by one link can be reused by any other at once. Code that uses a tensor on another stream
        must keep the tensor until that use has ended.
        """

    def new_stream(self) -> Stream:
        """Return a new non-blocking stream, which lasts as long as the process."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` the calling thread's current stream within the context."""

    def handle(self, stream: Stream) -> int:
        """Return the stream's cudaStream_t as an integer."""

    def current_handle(self) -> int:
        """Return the cudaStream_t of the current stream."""

    def record(self, stream: Stream, unused: CudaEvent | None = None) -> CudaEvent:
        """Record an untimed event at the end of `stream`; `unused`: an event to reuse."""

    def make_wait(self, stream: Stream, event: CudaEvent) -> None:
        """Make later work on `stream` wait for `event`. Returns at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue a copy on `stream`. Returns at once if the host side is page-locked."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None) -> torch.Tensor:
        """Allocate device memory for use on `stream`; None: on the current one."""

    def keep_until_done_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor`, once freed, from being reused before the present end of `stream`."""

    def idle(self, stream: Stream) -> bool:
        """Return whether all work on `stream` is done."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked host memory, uint8 [nbytes]."""

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Page-lock existing host memory. `address`: of a page."""

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`. No copy may use the memory any more."""


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
    """Return the Device of `tensors`; None: the CPU. Raises ValueError for anything but CPU and GPU."""
    if tensors.type == "cpu":
        return None
    if tensors.type != "cuda":
        raise ValueError(f"the host path carries tensors of CPUs and GPUs, not of {tensors}")
    return CudaDevice(tensors)


class DeviceThread(threading.Thread):
    """Thread that may call CUDA while another thread captures a CUDA graph.

    In a thread's default capture mode, most calls invalidate any capture in the process (pytorch#104487).
    """

    def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds. Logs a thread that goes on."""
        super().join(timeout)
        if self.is_alive():
            logger.warning("thread %s did not end within %.1f s, and goes on", self.name, timeout)

    def run(self) -> None:
        if _cuda.is_initialized() and (runtime := cuda_runtime()) is not None:
            mode = ctypes.c_int(_CAPTURES_OF_THIS_THREAD)
            status = runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            _check(status, "cudaThreadExchangeStreamCaptureMode")
        super().run()


def cuda_runtime() -> Any:
    """Return the CUDA runtime that torch has loaded, for calling functions that torch does not bind; None without a
    GPU.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def _check(status: Any, function: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{function} failed with CUDA error {int(status)}")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, uint8 [nbytes]."""
    # Not by reshape alone: a contiguous tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


OutOfMemory: type[Exception] = torch.OutOfMemoryError


def out_of_memory(link: str, cause: Exception) -> TransportError:
    """Return the error for a received message for which the device had no memory."""
    return TransportError(
        f"link {link}: the device has no memory left for a received message: {' '.join(str(cause).split())}. Received "
        "messages have a share of the memory of their own, besides what training has cached. Lower "
        "--adaptra-max-in-flight, or --adaptra-memory-fraction where the cap is measured; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets cached memory serve both"
    )


def device_error(link: str, cause: Exception) -> TransportError:
    """Return the error for copies that failed with `cause`."""
    if isinstance(cause, OutOfMemory):
        return out_of_memory(link, cause)
    return TransportError(
        f"link {link}: copying between the device and host memory failed; the device reported: {cause}. Look for the "
        "first error of that device in this process's log; restart from the last checkpoint, with "
        "CUDA_LAUNCH_BLOCKING=1 if the error does not say what caused it: messages then go by the host path alone"
    )
