# SPDX-License-Identifier: Apache-2.0
"""Replays an all-reduce with sets of ranks in place of sums: slow, obvious, and strict about ports."""

from __future__ import annotations

from collections.abc import Iterable

from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, RoundPhase

State = dict[tuple[int, int], frozenset[int]]
"""By rank and chunk: the ranks whose values are in the sum there."""


def replay(plan: AllReduce) -> None:
    """Assert that each rank uses each port once a round at most, and ends with each rank's value once."""
    held = {rank: [frozenset({rank})] for rank in range(plan.ranks)}
    for phase, members in ((plan.waiting, plan.ranks - 1), (plan.together, plan.ranks)):
        if not phase.rounds:
            continue
        state = {
            (rank, chunk): value
            for rank, values in held.items()
            for chunk, value in enumerate(cut(values, phase.chunks))
        }
        play(phase, state, range(members))
        held = {rank: [state[rank, chunk] for chunk in range(phase.chunks)] for rank in held}
    for rank, values in held.items():
        assert set(values) == {frozenset(range(plan.ranks))}, f"rank {rank} ends with {values}"


def cut(values: list[frozenset[int]], chunks: int) -> list[frozenset[int]]:
    """The same buffer in another number of chunks: possible if all of it is the same sum."""
    if len(values) == chunks:
        return values
    (alike,) = set(values)
    return [alike] * chunks


def play(phase: RoundPhase, state: State, members: Iterable[int]) -> None:
    """Bring `state` through all rounds of a phase that `members` take part in."""
    for transfers in phase.rounds:
        senders, receivers = [each.sender for each in transfers], [each.receiver for each in transfers]
        assert len(set(senders)) == len(senders), f"a rank sends twice: {transfers}"
        assert len(set(receivers)) == len(receivers), f"a rank receives twice: {transfers}"
        assert {*senders, *receivers} <= set(members)
        assert all(each.sender != each.receiver for each in transfers)
        sent = [(each, state[each.sender, each.chunk]) for each in transfers]
        for each, value in sent:
            place = each.receiver, each.chunk
            assert not each.adds or not value & state[place], f"{each} adds what is there already"
            state[place] = state[place] | value if each.adds else value
