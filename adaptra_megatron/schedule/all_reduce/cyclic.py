# SPDX-License-Identifier: Apache-2.0
"""StragglAR's rounds for any number of ranks, of a small table that was searched for.

The published synthesizer takes more rounds where the number of ranks is no power of two, and has none for odd numbers.
Rounds that are the same for each rank, but for a shift, do better: where rank p exchanges chunk p with the straggler in
round p, `ages` says for each distance d from 1 on how many rounds later rank p + d (modulo the number of fast ranks)
receives chunk p. One table is good if in each round no two ranks would have to receive from or send to the same rank.
That takes one round too many, so that rounds after the last exchange are given rank by rank: the *tail*.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaptra_megatron.schedule.all_reduce.rounds import Round, Transfer


def least_rounds(ranks: int) -> int:
    """The fewest rounds there can be once the straggler is there, if each rank sends and receives one chunk a round.

    The last chunk is complete on two ranks after round ranks - 1, and on twice as many after each further one.
    """
    return ranks - 2 + (ranks - 1).bit_length()


def cyclic_rounds(ranks: int, ages: Sequence[int], tail: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Rounds of a table. `tail`: by round and fast rank, how much older than the last chunk the one that it receives
    is; -1: it receives none."""
    fast, straggler = ranks - 1, ranks - 1
    copies = _copies(fast, ages)
    rounds: list[Round] = []
    for number in range(fast):
        exchanged = Transfer(number, straggler, number, adds=True), Transfer(straggler, number, number, adds=True)
        shifted = (
            Transfer((number - age + source) % fast, (number - age + target) % fast, number - age)
            for source, target, age in copies
            if number >= age
        )
        rounds.append((*exchanged, *shifted))
    held = held_after_cycles(ranks, ages)
    for older in tail:
        wanted = [(rank, fast - 1 - each) for rank, each in enumerate(older) if each >= 0]
        senders = _matched([[rank for rank in range(ranks) if chunk in held[rank]] for _, chunk in wanted])
        rounds.append(
            tuple(Transfer(sender, rank, chunk) for sender, (rank, chunk) in zip(senders, wanted, strict=True))
        )
        for rank, chunk in wanted:
            held[rank].add(chunk)
    return tuple(rounds)


def held_after_cycles(ranks: int, ages: Sequence[int]) -> list[set[int]]:
    """Complete chunks of each rank, the straggler's last, when the last exchange is over."""
    fast = ranks - 1
    held = [
        {chunk for chunk in range(fast) if chunk + ([0, *ages][(rank - chunk) % fast]) < fast} for rank in range(fast)
    ]
    return [*held, set(range(fast))]


def _copies(fast: int, ages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Distances of sender and receiver from a chunk's owner, and the age at which it is copied.

    A sender has the chunk already, and in no round is it asked for two: the shifts of its distance by the age differ.
    """
    at = [0, *ages]
    choices = [[place for place in range(1, fast) if at[(place + age) % fast] < age] for age in ages]
    places = _matched(choices)
    return [
        ((place + age) % fast, target, age) for target, (place, age) in enumerate(zip(places, ages, strict=True), 1)
    ]


def _matched(choices: Sequence[Sequence[int]]) -> list[int]:
    """One of each entry's choices, all different (Kuhn's algorithm)."""
    owner: dict[int, int] = {}

    def place(entry: int, seen: set[int]) -> bool:
        for choice in choices[entry]:
            if choice not in seen:
                seen.add(choice)
                if choice not in owner or place(owner[choice], seen):
                    owner[choice] = entry
                    return True
        return False

    for entry in range(len(choices)):
        assert place(entry, set()), f"a table of StragglAR's rounds asks for more than there is: entry {entry}"
    return [choice for _, choice in sorted((entry, choice) for choice, entry in owner.items())]
