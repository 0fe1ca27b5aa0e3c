# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that are spread over ranks, for Megatron's local layers.

Megatron's native attention refuses context parallelism, which Transformer Engine's supports. Here the keys and values
of all parts of the sequence are gathered, as Transformer Engine's `cp_comm_type="all_gather"` does. Megatron's native
attention then computes the result of this rank's queries.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention


class GatheringAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention with context parallelism.

    Forward gathers keys and values over the context-parallel group, backward reduces and scatters their gradients: both
    are collectives of ranks that must run their actions in one order.
    """

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1  # Megatron's own needs nothing more: it is given whole sequences
        super().__init__(whole, *args, **keywords)
        self._group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *args: Any, **rest: Any
    ) -> torch.Tensor:
        """`query`, `key`, `value`: [sequence / context-parallel size, micro-batch, heads, features].

        Returns [sequence / context-parallel size, micro-batch, heads * features]. `attention_mask`, of the whole
        sequence, is not used: the mask is causal.
        """
        size = self._group.size()
        positions = [_positions(query.size(0) * size, rank, size, query.device) for rank in range(size)]
        hidden = torch.cat(positions) > positions[self._group.rank()][:, None]
        keys, values = (gather_from_sequence_parallel_region(each, group=self._group) for each in (key, value))
        attended: torch.Tensor = super().forward(query, keys, values, hidden[None, None], *args, **rest)
        return attended


def _positions(length: int, rank: int, size: int, device: Any = None) -> torch.Tensor:
    """Return the positions of a sequence that `rank` of `size` holds, [length / size], int64.

    As `megatron.core.utils.get_batch_on_this_cp_rank`: of 2 * size parts one from the front and one from the back, so
    that causal masks give all ranks the same work.
    """
    parts = torch.arange(length, device=device).view(2 * size, -1)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])
