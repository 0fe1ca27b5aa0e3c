# SPDX-License-Identifier: Apache-2.0
"""Read a GPU's memory from torch; apart from `memory`, which is imported where torch is not."""

from __future__ import annotations

import os
from typing import Any

import torch

from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.control.stage_memory import DeviceBytes, MemorySource

logger = logger_of(__name__)


class CudaMemory:
    """MemorySource on torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp).

    A freed tensor leaves the allocated bytes at once. If other streams have used it, it leaves the active bytes only
    when an allocation finds that they are done with it. So growth is read from allocated bytes, which depend on what
    the program does and not on how far the device is behind it; and the peak from active ones, for which there must be
    memory. `begin_peak` begins the peaks of torch.cuda.max_memory_allocated and the like anew, too.
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
        # With backend:cudaMallocAsync nothing is known of the active bytes, and 0 told.
        return max(self._stat("active_bytes", "peak"), self._stat("allocated_bytes", "peak"))

    def device_nbytes(self) -> DeviceBytes:
        return DeviceBytes(*torch.cuda.mem_get_info(self._device))

    def shortages(self) -> int:
        return int(self._stats().get("num_alloc_retries", 0))

    def _stat(self, name: str, which: str) -> int:
        return int(self._stats()[name]["all"][which])

    def _stats(self) -> dict[str, Any]:
        # torch.cuda.memory_allocated() flattens and sorts the whole of this at each call.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats


def memory_of(device: torch.device) -> MemorySource | None:
    """The source for tensors on `device`; None in host memory, whose free bytes belong to every process of the host."""
    if device.type != "cuda":
        return None
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:True" not in settings and is_first_rank():
        logger.info(
            "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True less of a GPU's memory is lost to "
            "fragments, and fewer allocations wait for the whole GPU"
        )
    return CudaMemory(device)
