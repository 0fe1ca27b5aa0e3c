# SPDX-License-Identifier: Apache-2.0
"""Read a GPU's memory from torch. Apart from `stage_memory`, which is also imported where torch is missing."""

from __future__ import annotations

import os
from typing import Any

import torch

from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.control.stage_memory import DeviceBytes, MemorySource

logger = logger_of(__name__)


class CudaMemory:
    """MemorySource that reads torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp).

    A freed tensor leaves the allocated bytes at once. A tensor used on other streams leaves the active bytes later:
    once an allocation finds that these streams have finished. So growth is read from the allocated bytes, which do not
    depend on how far the device is behind the program. The peak is read from the active bytes, which the memory has to
    hold. `begin_peak` also resets the peaks of torch.cuda.max_memory_allocated and the like.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_nbytes(self) -> int:
        return self._stat("allocated_bytes", "current")

    def reserved_nbytes(self) -> int:
        return self._stat("reserved_bytes", "current")

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_nbytes(self) -> int:
        # With backend:cudaMallocAsync the active bytes are unknown, and reported as 0.
        return max(self._stat("active_bytes", "peak"), self._stat("allocated_bytes", "peak"))

    def device_nbytes(self) -> DeviceBytes:
        return DeviceBytes(*torch.cuda.mem_get_info(self._device))

    def shortages(self) -> int:
        return int(self._stats().get("num_alloc_retries", 0))

    def _stat(self, name: str, which: str) -> int:
        return int(self._stats()[name]["all"][which])

    def _stats(self) -> dict[str, Any]:
        # Not torch.cuda.memory_allocated(): it flattens and sorts all of this at each call.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats


def memory_of(device: torch.device) -> MemorySource | None:
    """Return the source for tensors on `device`; None for host memory, whose free bytes belong to all processes of the
    host."""
    if device.type != "cuda":
        return None
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:True" not in settings and is_first_rank():
        logger.info(
            "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True less of a GPU's memory is lost to "
            "fragments, and fewer allocations wait for the whole GPU"
        )
    return CudaMemory(device)
