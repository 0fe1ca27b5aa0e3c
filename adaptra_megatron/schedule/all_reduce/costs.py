# SPDX-License-Identifier: Apache-2.0
"""What all-reduces cost: a latency for each message, seconds for each byte, and the time that the straggler is away.

Times are *exposed* ones: from the arrival of the last rank, the straggler, until all have the sum. All ranks have one
full-duplex link of the same speed to all others (the model of arXiv 2505.23523).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from adaptra_megatron.schedule.all_reduce.stragglar import stragglar_rounds

MOST_CHUNKS = 256
"""In the chain of a hidden all-reduce: each is a message, and a schedule is to stay small."""


class Wire(NamedTuple):
    """Each rank's link."""

    latency_s: float
    """Time that each message takes beside its bytes."""
    byte_s: float
    """Seconds per byte."""

    def rounds_s(self, rounds: int, chunks: int, nbytes: float) -> float:
        """Seconds of rounds in which each message is one of `chunks` parts of `nbytes`."""
        return rounds * (self.latency_s + self.byte_s * nbytes / chunks)


def ring_s(ranks: int, nbytes: float, wire: Wire) -> float:
    """Exposed seconds of a ring, whatever the delay: it begins when all are there."""
    return wire.rounds_s(2 * (ranks - 1), ranks, nbytes)


def stock_s(ranks: int, nbytes: float, wire: Wire) -> float:
    """Exposed seconds of the best that a library can do, whatever the delay: a ring's bytes in the fewest messages.

    Recursive halving and doubling takes as long where the number of ranks is a power of two.
    """
    return 2 * (ranks - 1).bit_length() * wire.latency_s + wire.byte_s * nbytes * 2 * (ranks - 1) / ranks


def stragglar_s(ranks: int, nbytes: float, wire: Wire, delay_s: float) -> float:
    """Exposed seconds of StragglAR. `delay_s`: from the arrival of the last but one to that of the straggler.

    Raises ScheduleError for a number of ranks without a schedule.
    """
    left_s = max(0.0, stragglar_waiting_s(ranks, nbytes, wire) - delay_s)
    return left_s + wire.rounds_s(stragglar_rounds(ranks), ranks - 1, nbytes)


def stragglar_waiting_s(ranks: int, nbytes: float, wire: Wire) -> float:
    """Seconds of its reduce-scatter among those that wait, which a delay of this length hides."""
    return wire.rounds_s(ranks - 2, ranks - 1, nbytes)


def hidden_s(ranks: int, nbytes: float, wire: Wire, delay_s: float, chunks: int | None = None) -> float:
    """Exposed seconds of the hidden all-reduce, in `chunks` parts (None: `chain_chunks`); `delay_s` as above."""
    chunks = chain_chunks(ranks, nbytes, wire) if chunks is None else chunks
    left_s = max(0.0, hidden_waiting_s(ranks, nbytes, wire) - delay_s)
    return left_s + wire.rounds_s(chunks + ranks - 2, chunks, nbytes)


def hidden_waiting_s(ranks: int, nbytes: float, wire: Wire) -> float:
    """Seconds of its all-reduce among those that wait, which a delay of this length hides."""
    return wire.rounds_s(2 * (ranks - 2), ranks - 1, nbytes)


def chain_chunks(ranks: int, nbytes: float, wire: Wire) -> int:
    """The number of chunks with which a chain of all ranks takes the least time, `MOST_CHUNKS` at most."""
    worth_s = (ranks - 2) * nbytes * wire.byte_s  # of a chunk that is as long as the buffer
    if worth_s >= wire.latency_s * MOST_CHUNKS**2:
        return MOST_CHUNKS if worth_s else 1
    return max(1, round(math.sqrt(worth_s / wire.latency_s)))


def critical_delay_s(ranks: int, nbytes: float, wire: Wire) -> float:
    """The delay from which on StragglAR takes less than a ring; infinite where it never does."""
    saved_s = ring_s(ranks, nbytes, wire) - stragglar_s(ranks, nbytes, wire, math.inf)
    return max(0.0, stragglar_waiting_s(ranks, nbytes, wire) - saved_s) if saved_s > 0 else math.inf
