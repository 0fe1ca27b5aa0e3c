# SPDX-License-Identifier: Apache-2.0
"""An all-reduce as rounds of transfers between ranks, each of which sends and receives once a round at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.schedule.ir import ScheduleError, require_counts


class Transfer(NamedTuple):
    """One chunk on its way. What is sent is what the sender has at the beginning of the round."""

    sender: int
    receiver: int
    chunk: int
    adds: bool = False
    """True where the receiver adds it to what it has of the chunk, instead of putting it in its place."""


Round = tuple[Transfer, ...]


class RoundStep(NamedTuple):
    """One rank's part in a round; either half may be missing."""

    sends: Transfer | None
    receives: Transfer | None


@dataclass(frozen=True)
class RoundPhase:
    """Rounds over a buffer that is cut into `chunks` parts as equal as can be."""

    chunks: int
    rounds: tuple[Round, ...]

    def steps(self, rank: int) -> tuple[RoundStep, ...]:
        """Rounds of one rank, without those that it has no part in."""
        found = []
        for transfers in self.rounds:
            sends = next((each for each in transfers if each.sender == rank), None)
            receives = next((each for each in transfers if each.receiver == rank), None)
            if sends or receives:
                found.append(RoundStep(sends, receives))
        return tuple(found)

    def bounds(self, chunk: int, elements: int) -> tuple[int, int]:
        """First element of a chunk, and the one behind its last, of `elements`; they are equal for an empty chunk."""
        return chunk * elements // self.chunks, (chunk + 1) * elements // self.chunks


NOTHING = RoundPhase(1, ())


@dataclass(frozen=True)
class AllReduce:
    """A whole all-reduce of `ranks` ranks, of which the last, `ranks` - 1, is the straggler.

    Afterwards each rank has the sum over all, and all have added it up in the same way: replicas are equal to the bit.
    """

    ranks: int
    waiting: RoundPhase
    """Without the straggler, while the others wait for it. Without rounds, if there is nothing to do."""
    together: RoundPhase
    """With all, once the straggler is there."""


# All-reduces around a ring: of all ranks, and of all but the straggler, whose part then runs through a chain.


def ring(ranks: int) -> AllReduce:
    """The usual all-reduce, 2 (ranks - 1) rounds: it begins when the last rank is there. Raises ScheduleError for fewer
    than 2 ranks."""
    require_ranks(ranks)
    return AllReduce(ranks, NOTHING, RoundPhase(ranks, reduce_scatter(ranks) + _all_gather(ranks)))


def hidden(ranks: int, chunks: int) -> AllReduce:
    """An all-reduce of all but the straggler, and a chain for what the straggler has, cut into `chunks` parts.

    In the chain, rank 0 receives the straggler's chunks one by one, adds each to its own, and the next rank receives
    the sum a round later: `chunks` + ranks - 2 rounds. The last rank of the chain sends the straggler what it lacks,
    each chunk before the sum comes. The algorithm is our own; its rival is StragglAR, which needs half of the delay
    but more rounds of bandwidth. Raises ScheduleError for fewer than 2 ranks or no chunks.
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
    """Rounds after which rank r has the sum of chunk r of `ranks`."""
    return tuple(
        tuple(Transfer(rank, (rank + 1) % ranks, (rank - 1 - number) % ranks, adds=True) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def _all_gather(ranks: int) -> tuple[Round, ...]:
    """Rounds after which each rank has all chunks, of which rank r had chunk r."""
    return tuple(
        tuple(Transfer(rank, (rank + 1) % ranks, (rank - number) % ranks) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def require_ranks(ranks: int) -> None:
    """Raise ScheduleError for fewer than 2."""
    require_counts(ranks=ranks)
    if ranks < 2:
        raise ScheduleError("ranks must be at least 2: a single rank has nothing to reduce")
