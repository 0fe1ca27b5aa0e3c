# SPDX-License-Identifier: Apache-2.0
"""Represent an all-reduce as rounds of transfers, in each of which a rank sends and receives at most once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.schedule.ir import ScheduleError, require_counts


class Transfer(NamedTuple):
    """Transfer of one chunk, with its value at the beginning of the round."""

    sender: int
    receiver: int
    chunk: int
    adds: bool = False
    """True if the receiver adds it to its own chunk; False if it replaces that."""


Round = tuple[Transfer, ...]


class RoundStep(NamedTuple):
    """One rank's part in a round; either half may be missing."""

    sends: Transfer | None
    receives: Transfer | None


@dataclass(frozen=True)
class RoundPhase:
    """Rounds over a buffer that is divided into `chunks` parts of nearly equal size."""

    chunks: int
    rounds: tuple[Round, ...]

    def steps(self, rank: int) -> tuple[RoundStep, ...]:
        """Return the steps of one rank, without the rounds in which it has none."""
        found = []
        for transfers in self.rounds:
            sends = next((each for each in transfers if each.sender == rank), None)
            receives = next((each for each in transfers if each.receiver == rank), None)
            if sends or receives:
                found.append(RoundStep(sends, receives))
        return tuple(found)

    def bounds(self, chunk: int, elements: int) -> tuple[int, int]:
        """Return the first element of a chunk and the one behind its last, of `elements`; equal for an empty chunk."""
        return chunk * elements // self.chunks, (chunk + 1) * elements // self.chunks


NOTHING = RoundPhase(1, ())


@dataclass(frozen=True)
class AllReduce:
    """A whole all-reduce over `ranks` ranks, of which the last, `ranks` - 1, is the straggler.

    Afterwards each rank has the sum over all, added up in the same order: replicas are equal to the bit.
    """

    ranks: int
    waiting: RoundPhase
    """Rounds without the straggler, while the others wait for it. May be empty."""
    together: RoundPhase
    """Rounds with all ranks, once the straggler has arrived."""


# All-reduces around a ring: of all ranks, and of all but the straggler, whose part then runs through a chain.


def ring(ranks: int) -> AllReduce:
    """Return the usual ring in 2 (ranks - 1) rounds, which starts when the last rank has arrived.

    Raises ScheduleError for fewer than 2 ranks.
    """
    require_ranks(ranks)
    return AllReduce(ranks, NOTHING, RoundPhase(ranks, reduce_scatter(ranks) + _all_gather(ranks)))


def hidden(ranks: int, chunks: int) -> AllReduce:
    """Return an all-reduce over all ranks but the straggler, then a chain for the straggler's data in `chunks` parts.

    In the chain, rank 0 receives the straggler's chunks one by one and adds each to its own. The next rank receives the
    sum a round later: `chunks` + ranks - 2 rounds. The last rank of the chain sends the straggler the missing sums. The
    algorithm is our own. Its rival is StragglAR, which needs half of the delay but more rounds of bandwidth. Raises
    ScheduleError for fewer than 2 ranks or no chunks.
    """
    require_ranks(ranks)
    require_counts(chunks=chunks)
    fast, straggler = ranks - 1, ranks - 1
    rounds = []
    for number in range(chunks + ranks - 2):
        transfers = []
        if number < chunks:
            transfers += [
                Transfer(straggler, 0, number, adds=True),
                Transfer(fast - 1, straggler, number, adds=True),
            ]
        transfers += [Transfer(rank - 1, rank, number - rank) for rank in range(1, fast) if 0 <= number - rank < chunks]
        rounds.append(tuple(transfers))
    waiting = RoundPhase(fast, reduce_scatter(fast) + _all_gather(fast))
    return AllReduce(ranks, waiting, RoundPhase(chunks, tuple(rounds)))


def reduce_scatter(ranks: int) -> tuple[Round, ...]:
    """Return rounds after which rank r has the sum of chunk r of `ranks`."""
    return tuple(
        tuple(Transfer(rank, (rank + 1) % ranks, (rank - 1 - number) % ranks, adds=True) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def _all_gather(ranks: int) -> tuple[Round, ...]:
    """Return rounds after which each rank has all chunks. Before them rank r has chunk r."""
    return tuple(
        tuple(Transfer(rank, (rank + 1) % ranks, (rank - number) % ranks) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def require_ranks(ranks: int) -> None:
    """Raise ScheduleError for fewer than 2 ranks."""
    require_counts(ranks=ranks)
    if ranks < 2:
        raise ScheduleError("ranks must be at least 2: a single rank has nothing to reduce")
