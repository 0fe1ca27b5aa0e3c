# SPDX-License-Identifier: Apache-2.0
"""Sums over some of the replicas of a group: over those whose gradients make an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adaptra_megatron.data_parallel.peers import Begun, Exchange, Message
from adaptra_megatron.data_parallel.straggler_all_reduce import StragglerAllReduce
from adaptra_megatron.schedule.all_reduce.rings import ring


@dataclass(frozen=True)
class _Some:
    """An Exchange of some members, numbered anew."""

    peers: Exchange
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        return self.members.index(self.peers.index)

    def begin(self, sends: Message | None, receives: Message | None) -> Begun:
        return self.peers.begin(self._of_group(sends), self._of_group(receives))

    def _of_group(self, message: Message | None) -> Message | None:
        return None if message is None else Message(message.tensor, self.members[message.peer])


def sum_over(peers: Exchange, members: Sequence[int], values: torch.Tensor) -> None:
    """Put the sum over `members`, of which this is one, in place of `values`: a contiguous tensor of one dimension.

    All of them call this, in the same order, with the same size, and have the same afterwards, to the bit: a ring.
    Raises PeerError when a member fails.
    """
    if len(members) > 1:
        some = _Some(peers, tuple(members))
        StragglerAllReduce(some, ring(some.size), some.size - 1)(values)
