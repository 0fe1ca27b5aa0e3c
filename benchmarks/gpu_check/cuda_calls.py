# SPDX-License-Identifier: Apache-2.0
"""Calls of the host that may wait for a GPU, as the runtime, torch and their libraries make them."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from adaptra_megatron.transport.gpu.cuda_device import CudaDevice
from gpu_check.gpu import HostCall, Stream

BLOCK_NBYTES = 256 << 20
_cuda: Any = torch.cuda


def host_calls(device: CudaDevice) -> Mapping[str, HostCall]:
    """By their names. Those that may not wait are made while receives stand, by training or by a link's thread."""
    calls = _Calls(device)
    lazy = os.environ.get("CUDA_MODULE_LOADING") != "EAGER"
    return {
        "mem_get_info": HostCall(lambda stream: _cuda.mem_get_info, may_wait=False),
        "memory_stats": HostCall(lambda stream: _cuda.memory_stats, may_wait=False),
        "a new event": HostCall(calls.new_event, may_wait=False),
        "a new stream": HostCall(lambda stream: device.new_stream, may_wait=True),
        f"first use of a kernel, loaded {'lazily' if lazy else 'at start'},": HostCall(calls.first_use, may_wait=lazy),
        "cudaMalloc": HostCall(lambda stream: calls.allocate, may_wait=True),
        "cudaFree": HostCall(calls.free, may_wait=True),
        "empty_cache": HostCall(calls.empty_cache, may_wait=True),
        "an allocation that has cached blocks given back": HostCall(calls.retry, may_wait=True),
        "cudaHostAlloc": HostCall(lambda stream: lambda: device.page_locked(BLOCK_NBYTES), may_wait=True),
        "cudaHostRegister": HostCall(calls.lock_pages, may_wait=True),
        "cudaHostUnregister": HostCall(calls.unlock_pages, may_wait=True),
        "a cuBLAS handle for a new thread": HostCall(calls.cublas, may_wait=True),
        "a kernel that Triton compiles": HostCall(calls.triton, may_wait=True, at_once_s=10.0),
    }


class _Calls:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pages: list[mmap.mmap] = []
        # The one that torch has loaded, by its soname.
        self._runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")

    def allocate(self) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        status = self._runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(BLOCK_NBYTES))
        if status != 0:
            raise RuntimeError(f"CUDA error {status}")
        return memory

    def free(self, stream: Stream) -> Callable[[], Any]:
        memory = self.allocate()
        return lambda: self._runtime.cudaFree(memory)

    def new_event(self, stream: Stream) -> Callable[[], Any]:
        other = self._device.new_stream()
        return lambda: self._device.record(other).query()

    def first_use(self, stream: Stream) -> Callable[[], Any]:
        values = torch.ones(8, device="cuda")
        return lambda: torch.nextafter(values, values)  # compiled with torch, and used by nothing else

    def empty_cache(self, stream: Stream) -> Callable[[], Any]:
        torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device="cuda")
        call: Callable[[], Any] = _cuda.empty_cache
        return call

    def retry(self, stream: Stream) -> Callable[[], Any]:
        """There is room for one block, and it is freed while the kernel stands on a stream that has used it."""
        _cuda.empty_cache()
        limit_nbytes = _cuda.memory_reserved() + BLOCK_NBYTES * 3 // 2
        _cuda.set_per_process_memory_fraction(limit_nbytes / _cuda.mem_get_info()[1])
        blocks = [torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device="cuda")]
        retries = _cuda.memory_stats()["num_alloc_retries"]

        def allocate() -> None:
            blocks.pop().record_stream(stream)
            try:
                torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device="cuda")
            finally:
                _cuda.set_per_process_memory_fraction(1.0)
            if _cuda.memory_stats()["num_alloc_retries"] == retries:
                raise RuntimeError("nothing was given back")

        return allocate

    def lock_pages(self, stream: Stream) -> Callable[[], Any]:
        address = self._fresh_pages()
        return lambda: self._device.lock_pages(address, BLOCK_NBYTES)

    def unlock_pages(self, stream: Stream) -> Callable[[], Any]:
        address = self._fresh_pages()
        self._device.lock_pages(address, BLOCK_NBYTES)
        return lambda: self._device.unlock_pages(address)

    def cublas(self, stream: Stream) -> Callable[[], Any]:
        square = torch.ones(64, 64, device="cuda")
        torch.mm(square, square)  # loads the kernel, with the handle of this thread
        return lambda: torch.mm(square, square)

    def triton(self, stream: Stream) -> Callable[[], Any]:
        kernel = importlib.import_module("gpu_check.triton_kernel").add_one
        values = torch.zeros(8, device="cuda")
        return lambda: kernel[(1,)](values)

    def _fresh_pages(self) -> int:
        """The address of memory that was never page-locked."""
        self._pages.append(mmap.mmap(-1, BLOCK_NBYTES))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._pages[-1]))
