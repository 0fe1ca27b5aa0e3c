# SPDX-License-Identifier: Apache-2.0
"""StragglAR's rounds for 2, 4, 8, ... ranks (arXiv 2505.23523), constructed."""

from __future__ import annotations

from adaptra_megatron.schedule.all_reduce.rounds import Round, Transfer


def rounds_of_power(ranks: int) -> tuple[Round, ...]:
    """ranks + log2(ranks) - 2 rounds, for a power of two.

    From round q = log2(ranks) on, each fast rank holds one *active* chunk, which is complete but not on all ranks yet.
    At the beginning of round r chunk r - j is on 2 ** (j - 1) of them, and rank r, whose turn with the straggler it is,
    holds the oldest, r - q. All other holders of the oldest swap it with a rank that lacks it: the oldest is then
    everywhere and each other active chunk on twice as many ranks.
    """
    construction = _Construction(ranks)
    rounds = [construction.ramp_up(number) for number in range(construction.doublings)]
    rounds += [construction.steady(number) for number in range(construction.doublings, ranks - 1)]
    return tuple(rounds) + tuple(construction.drain())


class _Construction:
    """Which chunk is active on which rank, round by round."""

    def __init__(self, ranks: int) -> None:
        assert ranks.bit_count() == 1 < ranks, f"{ranks} ranks are no power of two"
        self.ranks, self.straggler = ranks, ranks - 1
        self.doublings = ranks.bit_length() - 1
        self.active: dict[int, int] = {}

    def ramp_up(self, number: int) -> Round:
        """Copies go to ranks without a chunk.

        Those whose turn is soon stay without one until then, and rank chunk + doublings gets the chunk that is to be
        the oldest when its turn comes.
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
        """One exchange, and all other ranks in pairs."""
        transfers = self._swap_oldest(number - self.doublings, number)
        self.active[number] = number
        return (*_exchange(number, self.straggler), *transfers)

    def drain(self) -> list[Round]:
        """The rounds after the last exchange: the straggler holds the last chunk as any other rank does."""
        self.active[self.straggler] = last = self.ranks - 2
        rounds = []
        while (oldest := min(self.active.values())) < last:
            rounds.append(self._swap_oldest(oldest, self.straggler))
        return rounds

    def _swap_oldest(self, oldest: int, turn: int) -> Round:
        """Pairs of a rank that holds the oldest chunk, but `turn`, and one that does not.

        Ranks whose turn is next get the smallest of the other chunks: they must hold the oldest one when it comes.
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
