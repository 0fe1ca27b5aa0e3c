# SPDX-License-Identifier: Apache-2.0
"""One rank's part in an all-reduce that is given as rounds, around a straggler that may be any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptra_megatron.data_parallel.peers import Exchange, Message
from adaptra_megatron.schedule.all_reduce.rounds import AllReduce, Phase, Step


class StragglerAllReduce:
    """Sums a tensor up over all members of a group, in place."""

    def __init__(self, peers: Exchange, plan: AllReduce, straggler: int) -> None:
        """`plan`: of as many ranks as `peers` has. `straggler`: index of the member that comes last; all must agree."""
        assert plan.ranks == peers.size, f"a plan of {plan.ranks} ranks for a group of {peers.size}"
        assert 0 <= straggler < plan.ranks, f"straggler {straggler} is none of {plan.ranks} members"
        self._peers = peers
        self._members = [member for member in range(plan.ranks) if member != straggler] + [straggler]
        own = self._members.index(peers.index)
        self._phases: Sequence[tuple[Phase, Sequence[Step]]] = [
            (phase, phase.steps(own)) for phase in (plan.waiting, plan.together)
        ]

    def __call__(self, values: torch.Tensor) -> None:
        """Put the sum over all members in place of `values`: contiguous, of one dimension, the same size everywhere.

        All members have the same afterwards, to the bit. Sums are in the tensor's own type. Raises PeerError when a
        member fails; what is in `values` is then of no use.
        """
        assert values.dim() == 1, f"{values.dim()} dimensions"
        assert values.is_contiguous()
        for phase, steps in self._phases:
            if steps:
                longest = -(-values.numel() // phase.chunks)
                scratch = torch.empty(longest, dtype=values.dtype, device=values.device)
                for step in steps:
                    self._take(step, phase, values, scratch)

    def _take(self, step: Step, phase: Phase, values: torch.Tensor, scratch: torch.Tensor) -> None:
        sends = receives = None
        if step.sends is not None:
            sends = self._message(values, phase, step.sends.chunk, step.sends.receiver)
        if step.receives is not None:
            receives = target = self._message(values, phase, step.receives.chunk, step.receives.sender)
            if step.receives.adds and target is not None:
                receives = Message(scratch[: target.tensor.numel()], target.peer)
        if sends is not None or receives is not None:
            self._peers.exchange(sends, receives)
        if step.receives is not None and step.receives.adds and target is not None:
            target.tensor.add_(scratch[: target.tensor.numel()])

    def _message(self, values: torch.Tensor, phase: Phase, chunk: int, position: int) -> Message | None:
        """One chunk to or from the member in a position of the plan; None for an empty one, on both ends."""
        first, end = phase.bounds(chunk, values.numel())
        return Message(values[first:end], self._members[position]) if end > first else None
