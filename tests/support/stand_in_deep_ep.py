# SPDX-License-Identifier: Apache-2.0
"""Stand in for DeepEP, which the `flex` dispatcher of Megatron's experts needs, on the CPU.

As deep_ep/buffer.py: a token goes once to each rank with any of its experts, in the order of tokens; what comes back is
added up in the order of ranks, in single precision. A backward exchanges the other way by the same handle.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

Handle = tuple[list[torch.Tensor], list[int], int]
"""The tokens that each rank gets, the number that comes from each, and the number of tokens here."""


class Buffer:
    """deep_ep.Buffer."""

    num_nvl_bytes = num_rdma_bytes = 0

    def __init__(self, group: dist.ProcessGroup, *_nbytes: int) -> None:
        self.group = group

    @staticmethod
    def set_num_sms(number: int) -> None:
        """Do nothing: there are none."""

    @staticmethod
    def get_dispatch_config(_size: int) -> Any:
        none = lambda *_: 0  # noqa: E731
        return SimpleNamespace(get_nvl_buffer_size_hint=none, get_rdma_buffer_size_hint=none)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: torch.Tensor, experts: int, **_: Any) -> tuple[Any, ...]:
        size = self.group.size()
        ranks = indices.div(experts // size, rounding_mode="floor")
        within = torch.stack([(ranks == rank).any(dim=1) for rank in range(size)], dim=1)
        of_experts = torch.bincount(indices[indices >= 0], minlength=experts)
        return within.sum(dim=0), None, of_experts, within, EventOverlap()

    def dispatch(self, x: torch.Tensor, *, handle: Handle | None = None, **given: Any) -> tuple[Any, ...]:
        if handle is not None:
            return self._there(x, handle), None, None, None, None, EventOverlap()
        within, of_experts = given["is_token_in_rank"], given["num_tokens_per_expert"]
        tokens = [column.nonzero().flatten() for column in within.T]
        come = torch.empty(len(tokens), dtype=torch.int64)
        dist.all_to_all_single(come, torch.tensor([len(each) for each in tokens]), group=self.group)
        handle = tokens, come.tolist(), len(x)
        here = len(of_experts) // self.group.size()
        indices = self._there(given["topk_idx"], handle) - here * self.group.rank()
        mine = (indices >= 0) & (indices < here)
        weights = self._there(given["topk_weights"], handle).where(mine, torch.zeros(()))
        indices = indices.where(mine, torch.tensor(-1))
        counts = torch.bincount(indices[mine], minlength=here).tolist()
        return self._there(x, handle), indices, weights, counts, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        weights = None if topk_weights is None else self._back(topk_weights, handle)
        return self._back(x, handle), weights, EventOverlap()

    def _there(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        tokens, come, _number = handle
        found = values.new_empty((sum(come), *values.shape[1:]))
        gone = [len(each) for each in tokens]
        dist.all_to_all_single(found, values[torch.cat(tokens)].contiguous(), come, gone, group=self.group)
        return found

    def _back(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        tokens, come, number = handle
        gone = [len(each) for each in tokens]
        found = values.new_empty((sum(gone), *values.shape[1:]))
        dist.all_to_all_single(found, values.contiguous(), gone, come, group=self.group)
        total = torch.zeros((number, *values.shape[1:]))
        for each, part in zip(tokens, found.split(gone), strict=True):
            total[each] += part.float()
        return total.to(values.dtype)


class EventHandle:
    """deep_ep.utils.EventHandle."""


class EventOverlap:
    """deep_ep.utils.EventOverlap."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Return at once: an exchange is over when its call returns."""


def install() -> None:
    """Have `import deep_ep` find it. Before Megatron is imported."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(package).update(Buffer=Buffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
