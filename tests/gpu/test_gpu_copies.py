# SPDX-License-Identifier: Apache-2.0
"""Copies between a real GPU and host memory: contents while streams stall and memory is used again, and no waiting."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Inbox, Ring
from adaptra_megatron.transport.cuda_device import CudaDevice
from adaptra_megatron.transport.device_copies import UNLIMITED_NBYTES, DeviceCopies, Payload
from adaptra_megatron.transport.incoming_copies import IncomingCopies

pytestmark = pytest.mark.gpu

MEBIBYTE = 1 << 20
UNIT = MEBIBYTE // 4
STALL_S = 0.4
AT_ONCE_S = 0.1
"""What a call may take that waits for no stalled stream."""


def stage(copies: Any, tensor: torch.Tensor) -> Any:
    """Send a tensor that is computed on the current stream."""
    return copies.stage(copies.computed(tensor))


def soon() -> float:
    return time.monotonic() + 30.0


@pytest.fixture
def copies(device: torch.device) -> Iterator[DeviceCopies]:
    made = DeviceCopies(
        CudaDevice(device), link="0->1", limit_nbytes=256 * MEBIBYTE, unit_nbytes=UNIT, on_ready=lambda: None
    )
    # The first message of a size pays for page-locked memory.
    for nbytes in (4 * MEBIBYTE, 16 * MEBIBYTE):
        stage(made, torch.zeros(nbytes, dtype=torch.uint8, device=device)).address(nbytes, soon())
    yield made
    torch.cuda.synchronize()
    made.close(10.0)


def content(payload: Payload, dtype: torch.dtype) -> torch.Tensor:
    """What is in host memory, as the link's writing thread would read it."""
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    address = payload.address(payload.nbytes, soon())
    return torch.frombuffer(bytearray(ctypes.string_at(address, payload.nbytes)), dtype=dtype)


class Wire:
    """A ring from a thread of this process into an inbox that never unmaps a block."""

    def __init__(self) -> None:
        self._inbox = Inbox(max_message_nbytes=1 << 32, pooled_nbytes=UNLIMITED_NBYTES)
        self._ring = Ring.create(16, UNIT)
        self._sequence = 0

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """float32 `values` in the memory of a received message."""
        description = Description(
            sequence=self._sequence,
            iteration=0,
            direction=0,
            chunk=0,
            micro_batch=0,
            dtype=DATA_TYPES["float32"],
            shape=list(values.shape),
        )
        self._sequence += 1
        writer = threading.Thread(target=self._ring.write, args=(description, values.data_ptr(), values.nbytes, soon()))
        writer.start()
        event = self._inbox.next(self._ring, soon())
        writer.join()
        assert event is not None
        return torch.frombuffer(event.payload, dtype=torch.float32).view(values.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1000, 1001), (5 * MEBIBYTE + 3,)])
def test_any_type_and_shape_leaves_the_device(
    copies: DeviceCopies, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randint(0, 2, shape, device=device).float().to(dtype)
    payload = stage(copies, values)
    expected = values.cpu().reshape(-1)
    assert torch.equal(content(payload, dtype).view(torch.uint8), expected.view(torch.uint8))


def test_staging_returns_at_once_while_the_device_computes(
    copies: DeviceCopies, device: torch.device, stall: Callable[[float], None]
) -> None:
    torch.cuda.synchronize()
    stall(STALL_S)
    made = torch.arange(4 * MEBIBYTE, device=device, dtype=torch.float32) * 2
    start_s = time.monotonic()
    payload = stage(copies, made)
    assert time.monotonic() - start_s < AT_ONCE_S
    assert not payload.ready
    assert torch.equal(content(payload, torch.float32), torch.arange(4 * MEBIBYTE, dtype=torch.float32) * 2)
    assert time.monotonic() - start_s > STALL_S / 2, "the device did stall"


def test_a_tensor_may_be_dropped_while_the_copy_stream_stalls(
    copies: DeviceCopies, device: torch.device, stall: Callable[[float], None]
) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._outgoing._stream):
        stall(STALL_S)
    payloads = []
    for number in range(8):
        payloads.append(stage(copies, torch.full((MEBIBYTE,), float(number), device=device)))
        # What the allocator gives out now would be the memory of the message, had it not been held.
        torch.full((MEBIBYTE,), -1.0, device=device)
    for number, payload in enumerate(payloads):
        assert torch.equal(content(payload, torch.float32), torch.full((MEBIBYTE,), float(number)))


def test_device_memory_is_free_again_once_it_has_been_read(copies: DeviceCopies, device: torch.device) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    payload = stage(copies, torch.ones(16 * MEBIBYTE, dtype=torch.uint8, device=device))
    payload.address(payload.nbytes, soon())
    deadline_s = soon()
    while torch.cuda.memory_allocated(device) > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_message_comes_back_to_the_device_for_another_path(copies: DeviceCopies, device: torch.device) -> None:
    payload = stage(copies, torch.arange(1000.0, device=device))
    expected = content(payload, torch.float32)
    deadline_s = soon()
    while payload._source is not None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert torch.equal(payload.computed().tensor.cpu(), expected)


def test_taking_returns_at_once_and_computation_sees_the_message(
    copies: DeviceCopies, device: torch.device, stall: Callable[[float], None]
) -> None:
    wire = Wire()
    values = torch.randn(4 * MEBIBYTE)
    copies.receive(wire.carry(values)).take()  # pays for page-locking, and for device memory
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._incoming._stream):
        stall(STALL_S)
    start_s = time.monotonic()
    tensor = copies.receive(wire.carry(values)).take()
    total = tensor.double().sum()
    assert time.monotonic() - start_s < STALL_S / 2, "neither page-locked memory nor a wait holds the thread"
    assert torch.equal(tensor.cpu(), values)
    assert time.monotonic() - start_s > STALL_S / 2, "the stream did stall"
    assert total.item() == pytest.approx(values.double().sum().item())


def test_a_received_tensor_may_be_dropped_while_computation_that_reads_it_is_queued(
    copies: DeviceCopies, device: torch.device, stall: Callable[[float], None]
) -> None:
    wire, sums = Wire(), []
    torch.cuda.synchronize()
    for number in range(20):
        tensor = copies.receive(wire.carry(torch.full((MEBIBYTE,), float(number)))).take()
        stall(0.01)
        sums.append(tensor.sum())
        del tensor
    assert [value.item() / MEBIBYTE for value in sums] == list(range(20))


def test_received_messages_are_page_locked_and_unlocked_at_the_end(device: torch.device) -> None:
    copies, wire = IncomingCopies(CudaDevice(device), link="1->0"), Wire()
    for nbytes in (100 * 4, MEBIBYTE, 9 * MEBIBYTE, 40 * 1024):
        host = wire.carry(torch.randn(nbytes // 4))
        receipt = copies.receive(host)
        assert host.is_pinned()
        assert torch.equal(receipt.take().cpu(), host)
    assert copies._page_locks.nbytes > 10 * MEBIBYTE
    torch.cuda.synchronize()
    copies.close(10.0)
    assert not host.is_pinned()


def test_copies_run_beside_computation_in_both_directions(
    copies: DeviceCopies, device: torch.device, stall: Callable[[float], None]
) -> None:
    wire = Wire()
    values = torch.randn(4 * MEBIBYTE)
    copies.receive(wire.carry(values)).take()
    ready = torch.ones(4 * MEBIBYTE, device=device)
    torch.cuda.synchronize()
    payload = stage(copies, ready)
    stall(STALL_S)
    start_s = time.monotonic()
    payload.address(payload.nbytes, soon())
    receipt = copies.receive(wire.carry(values))
    receipt.begin()
    copies._incoming._stream.synchronize()
    assert time.monotonic() - start_s < STALL_S / 2, "neither direction waits for what is computed meanwhile"
