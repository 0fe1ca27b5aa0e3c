# SPDX-License-Identifier: Apache-2.0
"""What is asked of torch.cuda, call by call; whether a GPU then does it is for tests/gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adaptra_megatron.transport.gpu.cuda_device import CudaDevice, DeviceThread, cuda_runtime

GPU = torch.device("cuda", 3)


class RecordedCuda:
    """The parts of torch.cuda that are used, and what they were asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.streams: list[Any] = []
        self.streams_made = 0

    def current_device(self) -> int:
        return 3

    def current_stream(self, device: torch.device) -> str:
        return f"current stream of {device}"

    def ExternalStream(self, pointer: int, device: torch.device) -> str:
        return f"stream {pointer} of {device}"

    def cudaStreamCreateWithPriority(self, made: Any, flags: int, priority: int) -> int:
        made._obj.value = self.streams_made = self.streams_made + 1
        self.calls.append(("create stream", flags, priority))
        return self.status

    def is_initialized(self) -> bool:
        return True

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.calls.append(("capture mode", mode._obj.value))
        return 0

    def Event(self, *, blocking: bool, enable_timing: bool) -> Any:
        self.calls.append(("event", blocking, enable_timing))
        return self

    def record(self, stream: str) -> None:
        self.calls.append(("record", stream))

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(("enter", device))
        yield
        self.calls.append(("leave", device))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def cudart(self) -> RecordedCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.status


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    recorded = RecordedCuda()
    monkeypatch.setattr("adaptra_megatron.transport.gpu.cuda_device._cuda", recorded)
    monkeypatch.setattr("adaptra_megatron.transport.gpu.cuda_device.cuda_runtime", lambda: recorded)
    return recorded


def test_a_torch_for_gpus_on_a_machine_without_one_has_no_runtime_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Megatron runs on CPUs with it, threads of ours ended as they began, and training stood still."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_runtime() is None


def test_a_device_without_index_is_the_present_one_for_all_threads(cuda: RecordedCuda) -> None:
    assert CudaDevice(torch.device("cuda")).device == GPU
    assert CudaDevice(torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_streams_are_the_devices_own_whatever_device_is_current(cuda: RecordedCuda) -> None:
    device = CudaDevice(GPU)
    assert device.current_stream() == "current stream of cuda:3"
    cuda.calls.clear()
    assert [device.new_stream() for _ in range(2)] == ["stream 2 of cuda:3", "stream 3 of cuda:3"]
    made = [("enter", GPU), ("create stream", 1, -65536), ("leave", GPU)]
    assert cuda.calls == [*made, *made], "of their own, not of torch's pool; waiting for no default stream"


def test_all_links_allocate_on_one_stream_of_the_device(cuda: RecordedCuda) -> None:
    device = CudaDevice(GPU)
    assert device.memory_stream == device.memory_stream == "stream 1 of cuda:3"


def test_a_stream_that_cannot_be_made_is_an_error(cuda: RecordedCuda) -> None:
    cuda.status = 2
    with pytest.raises(RuntimeError, match="cudaStreamCreateWithPriority failed with CUDA error 2"):
        CudaDevice(GPU)


def test_threads_sleep_on_events(cuda: RecordedCuda) -> None:
    device = CudaDevice(GPU)
    cuda.calls.clear()
    event = device.record("a stream")
    assert event is cuda
    assert cuda.calls == [("event", True, False), ("record", "a stream")]


def test_threads_of_ours_spoil_no_capture_of_others(cuda: RecordedCuda) -> None:
    """Else a query breaks the CUDA graph that another thread captures (pytorch#104487)."""
    thread = DeviceThread(lambda *given: cuda.calls.append(("runs", *given)), "adaptra-test", (7,))
    thread.start()
    thread.join(10.0)
    assert cuda.calls[-2:] == [("capture mode", 1), ("runs", 7)]


def test_copies_are_asynchronous_and_on_their_stream(cuda: RecordedCuda) -> None:
    class Target:
        def copy_(self, source: object, *, non_blocking: bool) -> None:
            cuda.calls.append(("copy", source, non_blocking, list(cuda.streams)))

    device = CudaDevice(GPU)
    cuda.calls.clear()
    device.copy(Target(), "source", "a stream")  # type: ignore[arg-type]
    assert cuda.calls == [("copy", "source", True, ["a stream"])]
    assert cuda.streams == []


def test_pages_are_locked_for_all_contexts_in_that_of_the_device(cuda: RecordedCuda) -> None:
    device = CudaDevice(GPU)
    cuda.calls.clear()
    device.lock_pages(4096, 8192)
    device.unlock_pages(4096)
    inside = [("enter", GPU), ("register", 4096, 8192, 1), ("leave", GPU)]
    assert cuda.calls == [*inside, ("enter", GPU), ("unregister", 4096), ("leave", GPU)]


def test_a_refused_page_lock_is_an_error(cuda: RecordedCuda) -> None:
    device = CudaDevice(GPU)
    cuda.status = 712
    with pytest.raises(RuntimeError, match="cudaHostRegister failed with CUDA error 712"):
        device.lock_pages(4096, 8192)
