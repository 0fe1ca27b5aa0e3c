# SPDX-License-Identifier: Apache-2.0
"""StragglAR's all-reduce (arXiv 2505.23523): the other ranks reduce as much as possible while they wait for the
straggler.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from adaptra_megatron.gradsync.all_reduce_rounds import (
    AllReduce,
    Round,
    RoundPhase,
    Transfer,
    reduce_scatter,
    require_ranks,
)
from adaptra_megatron.schedule.ir import ScheduleError

# StragglAR's rounds for 2, 4, 8, ... ranks (arXiv 2505.23523), constructed.


def rounds_of_power(ranks: int) -> tuple[Round, ...]:
    """Return the ranks + log2(ranks) - 2 rounds of StragglAR for a power of two.

    From round q = log2(ranks) on, each fast rank holds one *active* chunk: complete, but not on all ranks yet. At the
    beginning of round r, chunk r - j is on 2 ** (j - 1) of them. Rank r, which exchanges with the straggler in round r,
    holds the oldest, r - q. All other holders of the oldest swap it with a rank that lacks it. Then the oldest is
    everywhere, and each other active chunk is on twice as many ranks.
    """
    construction = _Construction(ranks)
    rounds = [construction.ramp_up(number) for number in range(construction.doublings)]
    rounds += [construction.steady(number) for number in range(construction.doublings, ranks - 1)]
    return tuple(rounds) + tuple(construction.drain())


class _Construction:
    """Active chunk of each rank, round by round."""

    def __init__(self, ranks: int) -> None:
        assert ranks.bit_count() == 1 < ranks, f"{ranks} ranks are no power of two"
        self.ranks, self.straggler = ranks, ranks - 1
        self.doublings = ranks.bit_length() - 1
        self.active: dict[int, int] = {}

    def ramp_up(self, number: int) -> Round:
        """Copy active chunks to ranks without one.

        Ranks that exchange with the straggler soon get none before that. Rank chunk + doublings gets the chunk that
        will be the oldest when the rank's turn comes.
        """
        critical = 2 * self.doublings - 2
        spare = [rank for rank in range(critical + 1, self.straggler) if rank not in self.active]
        copies = []
        for chunk, holder in sorted((chunk, holder) for holder, chunk in self.active.items()):
            successor = chunk + self.doublings
            receiver = successor if successor <= critical and successor not in self.active else spare.pop(0)
            copies.append(Transfer(holder, receiver, chunk))
            self.active[receiver] = chunk
        self.active[number] = number
        return (*_exchange(number, self.straggler), *copies)

    def steady(self, number: int) -> Round:
        """Return a round with one exchange, in which all other ranks swap in pairs."""
        transfers = self._swap_oldest(number - self.doublings, number)
        self.active[number] = number
        return (*_exchange(number, self.straggler), *transfers)

    def drain(self) -> list[Round]:
        """Return the rounds after the last exchange, in which the straggler holds the last chunk like any
        other rank.
        """
        self.active[self.straggler] = last = self.ranks - 2
        rounds = []
        while (oldest := min(self.active.values())) < last:
            rounds.append(self._swap_oldest(oldest, self.straggler))
        return rounds

    def _swap_oldest(self, oldest: int, turn: int) -> Round:
        """Pair each holder of the oldest chunk, except `turn`, with a rank that lacks it.

        Ranks whose exchange is next get the smallest of the other chunks: they must hold the oldest one by then.
        """
        holders = [rank for rank, chunk in self.active.items() if chunk == oldest and rank != turn]
        holders.sort(key=lambda rank: (not turn < rank < turn + self.doublings, rank))
        others = sorted((chunk, rank) for rank, chunk in self.active.items() if chunk != oldest and rank != turn)
        if turn == self.straggler:
            others = sorted((chunk, rank) for rank, chunk in self.active.items() if chunk != oldest)
        assert len(holders) == len(others), f"{len(holders)} ranks of {self.ranks} hold the oldest, {len(others)} not"
        transfers = []
        for holder, (chunk, other) in zip(holders, others, strict=True):
            if other != self.straggler:  # it has them all
                transfers.append(Transfer(holder, other, oldest))
            transfers.append(Transfer(other, holder, chunk))
            self.active[holder] = chunk
        return tuple(transfers)


def _exchange(chunk: int, straggler: int) -> Round:
    return Transfer(chunk, straggler, chunk, adds=True), Transfer(straggler, chunk, chunk, adds=True)


# StragglAR's rounds for any number of ranks, of a small table that was searched for.
# The published synthesizer takes more rounds where the number of ranks is no power of two, and has none for odd
# numbers. Rounds that are the same for each rank, but for a shift, do better: where rank p exchanges chunk p with
# the straggler in round p, `ages` says for each distance d from 1 on how many rounds later rank p + d (modulo the
# number of fast ranks) receives chunk p. One table is good if in each round no two ranks would have to receive from
# or send to the same rank. That takes one round too many, so that rounds after the last exchange are given rank by
# rank: the *tail*.


def least_rounds(ranks: int) -> int:
    """Return the minimum number of rounds after the straggler's arrival, if each rank sends and receives one chunk a
    round.

    The last chunk is complete on two ranks after round ranks - 1, and on twice as many after each further one.
    """
    return ranks - 2 + (ranks - 1).bit_length()


def cyclic_rounds(ranks: int, ages: Sequence[int], tail: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Return the rounds of a table.

    `tail`: by round and fast rank, how much older than the last chunk the received one is; -1: nothing is received.
    """
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
    """Return the complete chunks of each rank after the last exchange; the straggler's come last."""
    fast = ranks - 1
    held = [
        {chunk for chunk in range(fast) if chunk + ([0, *ages][(rank - chunk) % fast]) < fast} for rank in range(fast)
    ]
    return [*held, set(range(fast))]


def _copies(fast: int, ages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return, for each copy, the distances of sender and receiver from the chunk's owner, and the chunk's age.

    A sender already has the chunk, and never sends two chunks in one round: its distances shifted by the age all
    differ.
    """
    at = [0, *ages]
    choices = [[place for place in range(1, fast) if at[(place + age) % fast] < age] for age in ages]
    places = _matched(choices)
    return [
        ((place + age) % fast, target, age) for target, (place, age) in enumerate(zip(places, ages, strict=True), 1)
    ]


def _matched(choices: Sequence[Sequence[int]]) -> list[int]:
    """Return one of each entry's choices, all different (Kuhn's algorithm)."""
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


MOST_RANKS = 64
"""Maximum number of ranks with tables; powers of two have no limit."""


def stragglar(ranks: int) -> AllReduce:
    """Return StragglAR for `ranks` ranks: a reduce-scatter without the straggler, then exchanges with it.

    Chunk c goes to rank c in the reduce-scatter. In round c after the straggler's arrival both complete it: rank c adds
    the straggler's chunk, and the straggler adds rank c's. All other transfers copy complete chunks. There are
    `stragglar_rounds` rounds after the arrival. Raises ScheduleError if `has_stragglar` is False.
    """
    _require_table(ranks)
    fast = ranks - 1
    rounds = rounds_of_power(ranks) if ranks & fast == 0 else cyclic_rounds(ranks, *_tables()[ranks])
    return AllReduce(ranks, RoundPhase(fast, reduce_scatter(fast)), RoundPhase(fast, rounds))


def has_stragglar(ranks: int) -> bool:
    """Return whether there is a schedule for `ranks` ranks: for 2 to 64, and for powers of two."""
    return ranks >= 2 and (ranks <= MOST_RANKS or ranks & (ranks - 1) == 0)


def stragglar_rounds(ranks: int) -> int:
    """Return the number of rounds after the arrival: ranks + ceil(log2(ranks)) - 2, the minimum.

    Raises ScheduleError as `stragglar`.
    """
    _require_table(ranks)
    if ranks & (ranks - 1) == 0:
        return least_rounds(ranks)
    return ranks - 1 + len(_tables()[ranks][1])


def _require_table(ranks: int) -> None:
    require_ranks(ranks)
    if not has_stragglar(ranks):
        raise ScheduleError(
            f"StragglAR has no schedule for {ranks} ranks: it needs at most {MOST_RANKS}, or a power of two; use "
            "hidden or stock"
        )


@cache
def _tables() -> Mapping[int, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Return ages and tail (see `cyclic_rounds`) by number of ranks, as found by
    scripts/search_all_reduce_tables.py.
    """
    lines = files(__package__).joinpath("tables.csv").read_text().splitlines()
    return {
        int(row["ranks"]): (
            tuple(int(digit, 16) for digit in row["ages"]),
            tuple(tuple(-1 if digit == "-" else int(digit, 16) for digit in each) for each in row["tail"].split()),
        )
        for row in csv.DictReader(lines)
    }
