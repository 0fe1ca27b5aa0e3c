# SPDX-License-Identifier: Apache-2.0
"""Run one rank's part of any `AllReduce`, around a straggler that may be any rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, RoundPhase, RoundStep, ring
from adaptra_megatron.gradsync.peer_messages import Begun, PeerExchange, PeerMessage

_OPEN = 4
"""Maximum number of open sends and receives when another step begins."""


class StragglerAllReduce:
    """Sums a tensor over all members of a group, in place."""

    def __init__(self, peers: PeerExchange, plan: AllReduce, straggler: int) -> None:
        """`plan`: for as many ranks as `peers` has. `straggler`: index of the member that comes last; all must
        agree.
        """
        assert plan.ranks == peers.size, f"a plan of {plan.ranks} ranks for a group of {peers.size}"
        assert 0 <= straggler < plan.ranks, f"straggler {straggler} is none of {plan.ranks} members"
        self._peers = peers
        self._members = [member for member in range(plan.ranks) if member != straggler] + [straggler]
        own = self._members.index(peers.index)
        self._phases: Sequence[tuple[RoundPhase, Sequence[RoundStep]]] = [
            (phase, phase.steps(own)) for phase in (plan.waiting, plan.together)
        ]

    def __call__(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum over all members: a contiguous tensor [n], of the same size everywhere.

        All members get the same bits. Sums are in the tensor's own type. Raises PeerError if a member fails; the
        content of `values` is then unusable.
        """
        assert values.dim() == 1, f"{values.dim()} dimensions"
        assert values.is_contiguous()
        for phase, steps in self._phases:
            run = _Run(self._peers, self._members, phase, values)
            for step in steps:
                run.begin(step)
            run.finish()


class _Run:
    """One phase in progress over one tensor.

    A step waits only for earlier steps with the same chunks. So one link is not idle while a message of another is
    processed, and additions overlap with the next messages.
    """

    def __init__(self, peers: PeerExchange, members: Sequence[int], phase: RoundPhase, values: torch.Tensor) -> None:
        self._peers, self._members, self._phase, self._values = peers, members, phase, values
        self._open: list[tuple[int, Callable[[], None]]] = []
        """Sends and receives that may be in progress, in order: the chunk, and the function that ends it."""
        self._longest = -(-values.numel() // phase.chunks)
        self._scratch: list[torch.Tensor] = []

    def begin(self, step: RoundStep) -> None:
        """Begin a step once its chunks are free. Raises PeerError."""
        self._end({transfer.chunk for transfer in step if transfer is not None}, _OPEN)
        sends = self._message(step.sends.chunk, step.sends.receiver) if step.sends else None
        target = self._message(step.receives.chunk, step.receives.sender) if step.receives else None
        receives = target
        if step.receives is not None and step.receives.adds and target is not None:
            room = self._scratch.pop() if self._scratch else self._values.new_empty(self._longest)
            receives = PeerMessage(room[: target.tensor.numel()], target.peer)
        sent, received = self._peers.begin(sends, receives) if sends or receives else (None, None)
        if step.sends is not None and sent is not None:
            self._open.append((step.sends.chunk, sent))
        # Behind the send, for the chunk that is added to may be the one that is sent.
        if step.receives is not None and target is not None and receives is not target:
            received = functools.partial(self._add, received, target.tensor, room)
        if step.receives is not None and received is not None:
            self._open.append((step.receives.chunk, received))

    def finish(self) -> None:
        """Wait until all steps have ended. Raises PeerError."""
        self._end(set(), 0)

    def _end(self, chunks: Set[int], most: int) -> None:
        """End the open steps that have one of `chunks`, and the oldest ones beyond `most`."""
        beyond = len(self._open) - most
        ended = [half for number, half in enumerate(self._open) if number < beyond or half[0] in chunks]
        self._open = [half for number, half in enumerate(self._open) if number >= beyond and half[0] not in chunks]
        for _, end in ended:
            end()

    def _add(self, received: Callable[[], None] | None, target: torch.Tensor, room: torch.Tensor) -> None:
        if received is not None:
            received()
        target.add_(room[: target.numel()])
        self._scratch.append(room)

    def _message(self, chunk: int, position: int) -> PeerMessage | None:
        """Return the message of one chunk to or from the member at a position of the plan; None for an empty chunk."""
        first, end = self._phase.bounds(chunk, self._values.numel())
        return PeerMessage(self._values[first:end], self._members[position]) if end > first else None


# Sums over some of the replicas of a group: over those whose gradients make an update.


@dataclass(frozen=True)
class _Some:
    """Exchange among some members, which are renumbered."""

    peers: PeerExchange
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        return self.members.index(self.peers.index)

    def begin(self, sends: PeerMessage | None, receives: PeerMessage | None) -> Begun:
        return self.peers.begin(self._of_group(sends), self._of_group(receives))

    def _of_group(self, message: PeerMessage | None) -> PeerMessage | None:
        return None if message is None else PeerMessage(message.tensor, self.members[message.peer])


def sum_over(peers: PeerExchange, members: Sequence[int], values: torch.Tensor) -> None:
    """Replace `values`, a contiguous tensor [n], by the sum over `members`, which include this one.

    All members call this in the same order, with the same size, and get the same bits: it is a ring. Raises PeerError
    if a member fails.
    """
    if len(members) > 1:
        some = _Some(peers, tuple(members))
        StragglerAllReduce(some, ring(some.size), some.size - 1)(values)
