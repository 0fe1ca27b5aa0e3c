# SPDX-License-Identifier: Apache-2.0
"""A GPU as the checks of single processes see it: torch.cuda, and kernels.cu as built by scripts/gpu_check.sh."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from adaptra_megatron.transport.gpu.cuda_device import CudaDevice
from gpu_check.building import KERNELS
from gpu_check.cuda_calls import host_calls
from gpu_check.gpu import HostCall, Point, Standing, Stream

POOL = 32
"""Streams of one priority in torch's pool (c10/cuda/CUDAStream.cpp)."""
FLAGS = 4096
PRODUCTS = 10
_cuda: Any = torch.cuda


class _Standing:
    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    def release(self) -> None:
        self._flag.fill_(1)


class CudaGpu:
    """Implements Gpu."""

    def __init__(self) -> None:
        _cuda.set_device(0)
        self._device = CudaDevice(torch.device("cuda", 0))
        self.compute = _cuda.current_stream()
        self._library = ctypes.CDLL(str(KERNELS))
        words = 2 * self._library.held_words()
        self._words = torch.zeros(words, dtype=torch.int32, device="cuda")
        # Page-locked memory has the same address on the GPU. A flag is used once.
        flags = torch.zeros(FLAGS, dtype=torch.int32, pin_memory=True)
        self._flags = (flags[number : number + 1] for number in range(FLAGS))
        self._small = torch.zeros(1, device="cuda")
        self._products: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
        # Kernels are loaded at their first use, which may wait for the whole GPU.
        for standing in (self.stand(self.compute), self.take_multiprocessors(self.compute, 1, 1)):
            standing.release()
        self.kernel(self.compute)
        self.record(self.compute)
        self.synchronize()

    def pooled_streams(self) -> list[Stream]:
        return list({stream.cuda_stream: stream for stream in (_cuda.Stream() for _ in range(POOL))}.values())

    def link_streams(self, count: int) -> list[Stream]:
        return [self._device.new_stream() for _ in range(count)]

    def stand(self, stream: Stream) -> Standing:
        flag = next(self._flags)
        _launched(self._library.stand_until_set(_address(flag), _handle(stream)))
        return _Standing(flag)

    def take_multiprocessors(self, stream: Stream, blocks: int, cluster: int) -> Standing:
        flag = next(self._flags)
        words = _address(self._words)
        _launched(self._library.take_multiprocessors(_address(flag), words, blocks, cluster, _handle(stream)))
        return _Standing(flag)

    def kernel(self, stream: Stream) -> None:
        with _cuda.stream(stream):
            self._small.add_(1)

    def record(self, stream: Stream) -> Point:
        event: Any = _cuda.Event()
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def make_wait(self, stream: Stream, point: Point) -> None:
        stream.wait_event(point)

    def product_s(self, rows: int, inner: int, columns: int) -> float:
        shape = rows, inner, columns
        if shape not in self._products:
            pairs = ((rows, inner), (inner, columns), (rows, columns))
            self._products[shape] = tuple(torch.ones(pair, dtype=torch.bfloat16, device="cuda") for pair in pairs)
            self._multiply(*self._products[shape])  # pays for kernels and handles
        begun, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(self.compute)
        for _ in range(PRODUCTS):
            self._multiply(*self._products[shape])
        ended.record(self.compute)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / PRODUCTS / 1e3

    def synchronize(self) -> None:
        _cuda.synchronize()

    def host_calls(self) -> Mapping[str, HostCall]:
        return host_calls(self._device)

    def _multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(left, right, out=out)


def _handle(stream: Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _launched(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"a kernel was not launched: CUDA error {status}")
