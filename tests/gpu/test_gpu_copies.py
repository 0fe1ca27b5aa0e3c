# SPDX-License-Identifier: Apache-2.0
"""Copies between a real GPU and rings: contents while streams stall and memory is used again, and no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.gpu.copied_link import MEBIBYTE, PART, CopiedLink

from adaptra_megatron.transport.gpu.cuda_device import Computed, CudaDevice
from testing.waiting import until

pytestmark = pytest.mark.gpu

STALL_S = 0.4
AT_ONCE_S = 0.1
"""What a call may take that waits for no stalled stream."""


@pytest.fixture
def link(device: torch.device) -> Iterator[CopiedLink]:
    made = CopiedLink(CudaDevice(device))
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1000, 1001), (5 * MEBIBYTE + 3,)])
def test_any_type_and_shape_leaves_the_device(
    link: CopiedLink, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randint(0, 2, shape, device=device).float().to(dtype)
    arrived = link.carry(link.stage(values))
    assert (arrived.shape, arrived.dtype) == (values.shape, dtype)
    assert torch.equal(arrived.reshape(-1).view(torch.uint8), values.cpu().reshape(-1).view(torch.uint8))


def test_rings_are_page_locked_where_they_are_shared_with_another_process(link: CopiedLink) -> None:
    for ring in (link.outbound, link.inbound):
        assert torch.frombuffer(ring, dtype=torch.uint8).is_pinned()
    old = link.outbound
    link.connect()
    assert not torch.frombuffer(old, dtype=torch.uint8).is_pinned()


def test_staging_returns_at_once_while_the_device_computes(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None]
) -> None:
    torch.cuda.synchronize()
    stall(STALL_S)
    made = torch.arange(MEBIBYTE, device=device, dtype=torch.float32) * 2
    start_s = time.monotonic()
    payload = link.stage(made)
    assert time.monotonic() - start_s < AT_ONCE_S
    assert not payload.ready
    assert torch.equal(link.carry(payload), torch.arange(MEBIBYTE, dtype=torch.float32) * 2)
    assert time.monotonic() - start_s > STALL_S / 2, "the device did stall"


def test_a_tensor_may_be_dropped_while_the_copy_stream_stalls(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None]
) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(link.sending):
        stall(STALL_S)
    payloads = []
    for number in range(8):
        payloads.append(link.stage(torch.full((MEBIBYTE,), float(number), device=device)))
        # What the allocator gives out now would be the memory of the message, had it not been held.
        torch.full((MEBIBYTE,), -1.0, device=device)
    for number, payload in enumerate(payloads):
        assert torch.equal(link.carry(payload, number), torch.full((MEBIBYTE,), float(number)))


def test_device_memory_is_free_again_once_the_message_is_let_go_of(link: CopiedLink, device: torch.device) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    payload = link.stage(torch.ones(16 * MEBIBYTE, dtype=torch.uint8, device=device))
    for number in range(2):  # sent again over another session
        assert (link.carry(payload, number) == 1).all()
        link.connect()
    del payload
    until(lambda: torch.cuda.memory_allocated(device) == before)


def test_what_is_not_read_waits_for_no_computation(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None]
) -> None:
    nothing = torch.empty(MEBIBYTE, dtype=torch.uint8, device=device)
    link.carry(link.copies.stage(Computed(nothing, None)), 0)
    torch.cuda.synchronize()
    stall(STALL_S)
    start_s = time.monotonic()
    link.carry(link.copies.stage(Computed(nothing, None)), 1)
    assert time.monotonic() - start_s < STALL_S / 2


@pytest.mark.parametrize("asked", [True, False])
def test_taking_returns_at_once_and_computation_sees_the_message(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None], asked: bool
) -> None:
    values = torch.randn(PART // 2)  # half of the ring: what comes through it waits for no stalled copy
    link.receive(values, asked=asked).take()  # pays for page-locking, and for device memory
    torch.cuda.synchronize()
    with torch.cuda.stream(link.receiving):
        stall(STALL_S)
    start_s = time.monotonic()
    tensor = link.receive(values, asked=asked).take()
    total = tensor.double().sum()
    assert time.monotonic() - start_s < STALL_S / 2, "neither page-locked memory nor a wait holds the thread"
    assert torch.equal(tensor.cpu(), values)
    assert time.monotonic() - start_s > STALL_S / 2, "the stream did stall"
    assert total.item() == pytest.approx(values.double().sum().item())


def test_a_received_tensor_may_be_dropped_while_computation_that_reads_it_is_queued(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None]
) -> None:
    sums = []
    torch.cuda.synchronize()
    for number in range(20):
        tensor = link.receive(torch.full((MEBIBYTE,), float(number)), asked=bool(number % 3)).take()
        stall(0.01)
        sums.append(tensor.sum())
        del tensor
    assert [value.item() / MEBIBYTE for value in sums] == list(range(20))


def test_memory_of_early_messages_is_page_locked_and_unlocked_at_the_end(link: CopiedLink) -> None:
    for nbytes in (100 * 4, MEBIBYTE, 9 * MEBIBYTE, 40 * 1024):
        values = torch.randn(nbytes // 4)
        assert torch.equal(link.receive(values, asked=False).take().cpu(), values)
    assert link.copies._locks.nbytes > 10 * MEBIBYTE
    torch.cuda.synchronize()
    link.copies.close(10.0)
    assert link.copies._locks.nbytes == 0
    assert not torch.frombuffer(link.inbound, dtype=torch.uint8).is_pinned()


def test_copies_run_during_computation_in_both_directions(
    link: CopiedLink, device: torch.device, stall: Callable[[float], None]
) -> None:
    values = torch.randn(4 * MEBIBYTE)
    link.receive(values).take()
    ready = torch.ones(4 * MEBIBYTE, device=device)
    torch.cuda.synchronize()
    payload = link.stage(ready)
    stall(STALL_S)
    start_s = time.monotonic()
    link.carry(payload)
    link.receive(values)
    link.receiving.synchronize()
    assert time.monotonic() - start_s < STALL_S / 2, "neither direction waits for what is computed meanwhile"
