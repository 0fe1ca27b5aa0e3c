# SPDX-License-Identifier: Apache-2.0
"""A GPU through torch alone, without nvcc or anything of ours that is built: for what is to be asked first."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from adaptra_megatron.transport.device_session.nccl_library import (
    MAGIC,
    UNDEFINED,
    NcclConfig,
    NcclLibrary,
    UniqueId,
    torch_nccl,
)
from adaptra_megatron.transport.gpu.cuda_device import CudaDevice, DeviceThread
from gpu_check.gpu import Point, Standing, Stream

STANDS_S, FILLED_S = 0.15, 4.0
ROUNDS, WARM_UP, MESSAGE_NBYTES = 600, 100, 4096
_cuda: Any = torch.cuda


class _Sleeping:
    """A kernel that ends by itself."""

    def release(self) -> None:
        """It cannot be ended: who waits for the device waits for it."""


class TorchGpu:
    """Implements first.FirstGpu."""

    def __init__(self) -> None:
        _cuda.set_device(0)
        self._device = CudaDevice(torch.device("cuda", 0))
        self.compute = _cuda.current_stream()
        self._small = torch.zeros(1, device="cuda")
        self._other = torch.zeros(1, device="cuda")
        self.kernel(self.compute)
        self._cycles_per_s = self._calibrated()

    def link_streams(self, count: int) -> list[Stream]:
        return [self._device.new_stream() for _ in range(count)]

    def default_streams(self, count: int) -> list[Stream]:
        """Of normal priority, as NCCL's own."""
        return [_cuda.Stream(priority=0) for _ in range(count)]

    def stand(self, stream: Stream, seconds: float = STANDS_S) -> Standing:
        with _cuda.stream(stream):
            _cuda._sleep(int(seconds * self._cycles_per_s))
        return _Sleeping()

    def kernel(self, stream: Stream) -> None:
        with _cuda.stream(stream):
            self._small.add_(1)

    def record(self, stream: Stream, *, timed: bool = False, blocking: bool = False) -> Point:
        event: Any = _cuda.Event(enable_timing=timed, blocking=blocking)
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def make_wait(self, stream: Stream, point: Point) -> None:
        stream.wait_event(point)

    def synchronize(self) -> None:
        _cuda.synchronize()

    def fill(self) -> int:
        """Launch behind a kernel that stands until the host is kept; returns how often that went."""
        link = self.link_streams(1)[0]
        self.stand(link, FILLED_S)
        _cuda.current_stream().wait_event(self.record(link))
        launched = [0]

        def launch() -> None:
            for _ in range(6000):
                self._small.add_(1)
                launched[0] += 1

        threading.Thread(target=launch, daemon=True).start()
        time.sleep(0.8)
        return launched[0]

    def calls_when_full(self) -> Mapping[str, Callable[[], Any]]:
        """What threads of ours ask meanwhile, on streams that nothing else is on."""
        idle, second = self.link_streams(2)
        early = self.record(idle)
        _cuda.synchronize()

        def kernel() -> None:
            with _cuda.stream(second):
                self._other.add_(1)

        return {
            "a query of an event that was reached": early.query,
            "a record on an idle stream": lambda: self.record(idle),
            "a kernel on another idle stream": kernel,
            "mem_get_info": _cuda.mem_get_info,
            "cudaHostAlloc": lambda: self._device.page_locked(8 << 20),
        }

    def captured_with_thread(self, ours: bool) -> str | None:
        """Why a CUDA graph could not be captured while another thread queries an event; None where it could. `ours`:
        whether that is a thread as links have them."""
        event, over = self.record(self.compute), threading.Event()
        _cuda.synchronize()

        def query() -> None:
            while not over.is_set():
                try:
                    event.query()
                except RuntimeError:
                    return

        thread = DeviceThread(query, "query") if ours else threading.Thread(target=query, daemon=True)
        thread.start()
        try:
            with _cuda.graph(_cuda.CUDAGraph()):
                for _ in range(2000):
                    self._small.add_(1)
        except RuntimeError as cause:
            return str(cause).splitlines()[0]
        finally:
            over.set()
            thread.join()
        return None

    def costs_us(self) -> Mapping[str, float]:
        """What calls take on the host."""
        link = self.link_streams(1)[0]
        old = self.record(link)
        calls: dict[str, Callable[[], Any]] = {
            "new timed event and its record": lambda: self.record(link, timed=True, blocking=True),
            "record of an old event": lambda: old.record(link),  # type: ignore[attr-defined]
            "wait of a stream for an event": lambda: link.wait_event(old),
            "query": old.query,
        }
        found = {name: _microseconds(call) for name, call in calls.items()}
        library = torch_nccl()
        for blocking in (False, True):
            name = f"a transfer to itself by NCCL {library.version()}, {'' if blocking else 'not '}blocking"
            found[name] = self._transfer_us(library, link, blocking)
        return found

    def _transfer_us(self, library: NcclLibrary, link: Stream, blocking: bool) -> float:
        nccl, stream = library._library, ctypes.c_void_p(link.cuda_stream)
        made = ctypes.c_void_p()
        config = NcclConfig(ctypes.sizeof(NcclConfig), MAGIC, library.version(), blocking, *(UNDEFINED,) * 2, 2)
        config.split_share = config.traffic_class = UNDEFINED
        identity = UniqueId.from_buffer_copy(library.new_unique_id())
        nccl.ncclCommInitRankConfig(ctypes.byref(made), 1, identity, 0, ctypes.byref(config))
        communicator = made.value or 0

        def settle() -> None:
            while library.in_progress(communicator):
                pass

        settle()
        sent, received = (torch.zeros(MESSAGE_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        seconds = []
        for number in range(ROUNDS):
            begun_s = time.perf_counter()
            nccl.ncclGroupStart()
            for function, tensor in ((nccl.ncclSend, sent), (nccl.ncclRecv, received)):
                address, nbytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
                function(address, nbytes, 1, 0, ctypes.c_void_p(communicator), stream)
            nccl.ncclGroupEnd()
            settle()
            seconds.append(time.perf_counter() - begun_s)
            if number % 50 == 49:
                _cuda.synchronize()
        library.abort(communicator)
        return 1e6 * statistics.median(seconds[WARM_UP:])

    def _calibrated(self) -> float:
        """Cycles per second of the kernel that sleeps."""
        cycles = 20_000_000
        _cuda._sleep(1000)
        _cuda.synchronize()
        begun_s = time.perf_counter()
        _cuda._sleep(cycles)
        _cuda.synchronize()
        return cycles / (time.perf_counter() - begun_s)


def _microseconds(call: Callable[[], Any], count: int = 2000) -> float:
    for _ in range(100):
        call()
    _cuda.synchronize()
    begun_s = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - begun_s) / count
