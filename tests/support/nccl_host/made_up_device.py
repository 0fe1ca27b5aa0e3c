# SPDX-License-Identifier: Apache-2.0
"""A GPU of made-up CUDA, as links use one: `cuda_device.Device` on its runtime, with tensors in host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from adaptra_megatron.transport.device_session.nccl_library import NcclLibrary

_NOT_READY = 600
_NO_TIMES = 2
_EITHER_WAY = 4


class MadeUpCuda:
    """The two libraries that `make test-nccl-host` builds."""

    def __init__(self, directory: Path) -> None:
        self.runtime = ctypes.CDLL(str(directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.nccl = ctypes.CDLL(str(directory / "libnccl.so"))
        self.runtime.madeUpCudaWorks.restype = ctypes.c_char_p

    def library(self) -> NcclLibrary:
        """NCCL as this package calls it."""
        return NcclLibrary(self.nccl, self.runtime)

    def works(self) -> list[tuple[str, int]]:
        """What was put on streams since the last call, by letters that made_up_cuda.cpp explains, and on which."""
        return [(each[0], int(each[1:])) for each in self.runtime.madeUpCudaWorks().decode().split()]


class MadeUpEvent:
    """As torch.cuda.Event."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime, self.handle = runtime, ctypes.c_void_p()
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(self.handle), _NO_TIMES) == 0

    def query(self) -> bool:
        """Return whether the device has reached it."""
        status = self._runtime.cudaEventQuery(self.handle)
        assert status in (0, _NOT_READY)
        return bool(status == 0)

    def synchronize(self) -> None:
        """Sleep until then."""
        assert self._runtime.cudaEventSynchronize(self.handle) == 0


class MadeUpDevice:
    """Implements `cuda_device.Device`. A stream is its handle."""

    device = torch.device("cpu", 0)

    def __init__(self, cuda: MadeUpCuda, index: int) -> None:
        self.runtime = cuda.runtime
        self.device = torch.device("cpu", index)
        assert self.runtime.cudaSetDevice(index) == 0
        self.memory_stream = self.new_stream()
        self._using = threading.local()

    def current_stream(self) -> int:
        """Within `use`, that one; else the default stream."""
        return int(getattr(self._using, "stream", 0))

    current_handle = current_stream

    def new_stream(self) -> int:
        """Of this device."""
        made = ctypes.c_void_p()
        assert self.runtime.cudaSetDevice(self.device.index) == 0
        assert self.runtime.cudaStreamCreateWithPriority(ctypes.byref(made), 1, 0) == 0
        return made.value or 0

    def handle(self, stream: int) -> int:
        """Itself."""
        return stream

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """As torch.cuda.stream, which makes the stream's device the thread's, too."""
        before, self._using.stream = self.current_stream(), stream
        assert self.runtime.cudaSetDevice(self.device.index) == 0
        try:
            yield
        finally:
            self._using.stream = before

    def record(self, stream: int, unused: MadeUpEvent | None = None) -> MadeUpEvent:
        """Put an event on `stream`."""
        event = MadeUpEvent(self.runtime) if unused is None else unused
        assert self.runtime.cudaEventRecord(event.handle, ctypes.c_void_p(stream)) == 0
        return event

    def make_wait(self, stream: int, event: MadeUpEvent) -> None:
        """As cudaStreamWaitEvent."""
        assert self.runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream), event.handle, 0) == 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        """The host's memory is the device's."""
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        """As cudaMemcpyAsync."""
        addresses = (ctypes.c_void_p(each.data_ptr()) for each in (target, source))
        size = ctypes.c_size_t(source.nbytes)
        assert self.runtime.cudaMemcpyAsync(*addresses, size, _EITHER_WAY, ctypes.c_void_p(stream)) == 0

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Never freed."""
        made = ctypes.c_void_p()
        assert self.runtime.cudaHostAlloc(ctypes.byref(made), ctypes.c_size_t(nbytes), 0) == 0
        assert made.value is not None
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(made.value), dtype=torch.uint8)

    def idle(self, stream: int) -> bool:
        """Return whether all that was put on `stream` is done."""
        return bool(self.runtime.cudaStreamQuery(ctypes.c_void_p(stream)) == 0)
