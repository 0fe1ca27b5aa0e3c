# SPDX-License-Identifier: Apache-2.0
"""All-reduces around a ring: of all ranks, and of all but the straggler, whose part then runs through a chain."""

from __future__ import annotations

from adaptra_megatron.schedule.all_reduce.rounds import NOTHING, AllReduce, Phase, Round, Transfer
from adaptra_megatron.schedule.errors import ScheduleError, require_counts


def ring(ranks: int) -> AllReduce:
    """The usual all-reduce, 2 (ranks - 1) rounds: it begins when the last rank is there. Raises ScheduleError for fewer
    than 2 ranks."""
    require_ranks(ranks)
    return AllReduce(ranks, NOTHING, Phase(ranks, reduce_scatter(ranks) + _all_gather(ranks)))


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
    waiting = Phase(fast, reduce_scatter(fast) + _all_gather(fast))
    return AllReduce(ranks, waiting, Phase(chunks, tuple(rounds)))


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
