# SPDX-License-Identifier: Apache-2.0
"""Times and memory as a real GPU tells them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from adaptra_megatron.engine.device_memory import CudaMemory
from adaptra_megatron.engine.execution.executor import make_timer
from adaptra_megatron.transport.gpu.device_clock import EXACT_S, CudaEvents, DeviceClock

pytestmark = pytest.mark.gpu


def test_marks_tell_when_the_gpu_came_to_them_and_wait_for_nothing(
    device: torch.device, stall: Callable[[float], None]
) -> None:
    timer = make_timer(DeviceClock(CudaEvents()))
    for _ in range(3):  # events are used again
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        marks = [timer.mark()]
        for seconds in (0.05, 0.1):
            stall(seconds)
            marks.append(timer.mark())
        launched_s = time.monotonic() - begun_s
        assert not timer.over(marks)
        start_s, middle_s, end_s = timer.resolve(marks)
        assert launched_s < 0.02
        assert start_s == pytest.approx(begun_s, abs=2e-3)
        assert middle_s - start_s == pytest.approx(0.05, rel=0.2)
        assert end_s - middle_s == pytest.approx(0.1, rel=0.2)
        assert end_s == pytest.approx(time.monotonic(), abs=2e-3)
        assert timer.over(marks)


def test_clocks_are_related_while_the_device_computes(device: torch.device, stall: Callable[[float], None]) -> None:
    clock = DeviceClock(CudaEvents())
    torch.cuda.synchronize()
    stall(0.3)
    begun_s = time.monotonic()
    clock.seconds([])
    assert time.monotonic() - begun_s < 0.1
    assert clock._anchors[-1].width_s < EXACT_S
    mark = clock.mark()  # behind the stall, and after the anchor
    torch.cuda.synchronize()
    assert clock.seconds([mark]) == pytest.approx([time.monotonic()], abs=2e-3)


def test_memory_is_counted_at_once(device: torch.device, stall: Callable[[float], None]) -> None:
    memory = CudaMemory(device)
    before = memory.allocated_nbytes()
    memory.begin_peak()
    begun_s = time.monotonic()
    stall(0.2)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert memory.allocated_nbytes() - before == 64 << 20
    del block
    assert memory.allocated_nbytes() == before
    assert memory.peak_nbytes() - before >= 64 << 20
    free, total = memory.device_nbytes()
    assert 0 < free < total
    assert memory.reserved_nbytes() >= 64 << 20
    assert memory.shortages() >= 0
    assert time.monotonic() - begun_s < 0.15, "none of it waits for the device"
    torch.cuda.synchronize()


def test_memory_that_another_stream_still_uses_counts_in_the_peak(
    device: torch.device, stall: Callable[[float], None]
) -> None:
    memory = CudaMemory(device)
    before = memory.allocated_nbytes()
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        stall(0.2)
        block.record_stream(torch.cuda.current_stream())
    del block
    memory.begin_peak()
    assert memory.allocated_nbytes() == before
    again = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert memory.allocated_nbytes() - before == again.nbytes
    assert memory.peak_nbytes() - before >= 128 << 20
    torch.cuda.synchronize()
