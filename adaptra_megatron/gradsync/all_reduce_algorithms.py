# SPDX-License-Identifier: Apache-2.0
"""All-reduces around a straggler, by their names in --adaptra-gradient-sync.

A new one is a module, a row here, and its help in the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, hidden
from adaptra_megatron.gradsync.stragglar import MOST_RANKS, has_stragglar, stragglar, stragglar_rounds

# What all-reduces cost: a latency for each message, seconds for each byte, and the time that the straggler is away.
# Times are *exposed* ones: from the arrival of the last rank, the straggler, until all have the sum. All ranks have
# one full-duplex link of the same speed to all others (the model of arXiv 2505.23523).

MOST_CHUNKS = 256
"""Maximum number of chunks in the chain of a hidden all-reduce: each is a message, and schedules should stay small."""


class AllReduceWire(NamedTuple):
    """Speed of each rank's link."""

    latency_s: float
    """Time of each message in addition to its bytes."""
    byte_s: float
    """Seconds per byte."""

    def rounds_s(self, rounds: int, chunks: int, nbytes: float) -> float:
        """Return the seconds of rounds in which each message is one of `chunks` parts of `nbytes`."""
        return rounds * (self.latency_s + self.byte_s * nbytes / chunks)


def ring_s(ranks: int, nbytes: float, wire: AllReduceWire) -> float:
    """Return the exposed seconds of a ring, which starts when all ranks have arrived, whatever the delay."""
    return wire.rounds_s(2 * (ranks - 1), ranks, nbytes)


def stock_s(ranks: int, nbytes: float, wire: AllReduceWire) -> float:
    """Return the exposed seconds of the best library algorithm, whatever the delay: a ring's bytes in the fewest
    messages.

    Recursive halving and doubling takes this time if the number of ranks is a power of two.
    """
    return 2 * (ranks - 1).bit_length() * wire.latency_s + wire.byte_s * nbytes * 2 * (ranks - 1) / ranks


def stragglar_s(ranks: int, nbytes: float, wire: AllReduceWire, delay_s: float) -> float:
    """Return the exposed seconds of StragglAR. `delay_s`: time between the arrivals of the last two ranks.

    Raises ScheduleError for a number of ranks without a schedule.
    """
    left_s = max(0.0, stragglar_waiting_s(ranks, nbytes, wire) - delay_s)
    return left_s + wire.rounds_s(stragglar_rounds(ranks), ranks - 1, nbytes)


def stragglar_waiting_s(ranks: int, nbytes: float, wire: AllReduceWire) -> float:
    """Return the seconds of StragglAR's reduce-scatter among the waiting ranks, which a delay of this length hides."""
    return wire.rounds_s(ranks - 2, ranks - 1, nbytes)


def hidden_s(ranks: int, nbytes: float, wire: AllReduceWire, delay_s: float, chunks: int | None = None) -> float:
    """Return the exposed seconds of the hidden all-reduce, in `chunks` parts (None: `chain_chunks`).

    `delay_s`: time between the arrivals of the last two ranks.
    """
    chunks = chain_chunks(ranks, nbytes, wire) if chunks is None else chunks
    left_s = max(0.0, hidden_waiting_s(ranks, nbytes, wire) - delay_s)
    return left_s + wire.rounds_s(chunks + ranks - 2, chunks, nbytes)


def hidden_waiting_s(ranks: int, nbytes: float, wire: AllReduceWire) -> float:
    """Return the seconds of the hidden all-reduce among the waiting ranks, which a delay of this length hides."""
    return wire.rounds_s(2 * (ranks - 2), ranks - 1, nbytes)


def chain_chunks(ranks: int, nbytes: float, wire: AllReduceWire) -> int:
    """Return the number of chunks for which a chain of all ranks is fastest, at most `MOST_CHUNKS`."""
    worth_s = (ranks - 2) * nbytes * wire.byte_s  # of a chunk that is as long as the buffer
    if worth_s >= wire.latency_s * MOST_CHUNKS**2:
        return MOST_CHUNKS if worth_s else 1
    return max(1, round(math.sqrt(worth_s / wire.latency_s)))


def critical_delay_s(ranks: int, nbytes: float, wire: AllReduceWire) -> float:
    """Return the delay from which on StragglAR takes less than a ring; infinite if it never does."""
    saved_s = ring_s(ranks, nbytes, wire) - stragglar_s(ranks, nbytes, wire, math.inf)
    return max(0.0, stragglar_waiting_s(ranks, nbytes, wire) - saved_s) if saved_s > 0 else math.inf


_CHAIN_CHUNK_NBYTES = 1 << 20
"""Size of chunks in the chain of a hidden all-reduce before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An all-reduce algorithm, with the functions and texts to choose, run and describe it."""

    plan: Callable[[int, int], AllReduce]
    """Returns the rounds for a number of ranks, the last of which is the straggler, and a number of chunks."""
    chunks: Callable[[int, int, AllReduceWire | None], int]
    """Returns the number of chunks for a number of ranks, a number of bytes, and the wire; None: nothing is measured
    yet.
    """
    exposed_s: Callable[[int, float, AllReduceWire, float], float]
    """Returns the exposed seconds for ranks, bytes, wire and delay."""
    waiting_s: Callable[[int, float, AllReduceWire], float]
    """Returns the seconds of the work without the straggler, for ranks, bytes and wire. It is linear in the bytes."""
    supports: Callable[[int], bool] = lambda ranks: True
    """Returns whether there is a plan for a number of ranks."""
    needs: str = ""
    """Describes the supported numbers of ranks."""


def _chunks_of_chain(ranks: int, nbytes: int, wire: AllReduceWire | None) -> int:
    if wire is None:
        return min(MOST_CHUNKS, -(-nbytes // _CHAIN_CHUNK_NBYTES))
    return chain_chunks(ranks, nbytes, wire)


ALGORITHMS: Mapping[str, Algorithm] = {
    "stragglar": Algorithm(
        plan=lambda ranks, chunks: stragglar(ranks),
        chunks=lambda ranks, nbytes, wire: ranks - 1,
        exposed_s=stragglar_s,
        waiting_s=stragglar_waiting_s,
        supports=has_stragglar,
        needs=f"at most {MOST_RANKS}, or a power of two",
    ),
    "hidden": Algorithm(
        plan=hidden,
        chunks=_chunks_of_chain,
        exposed_s=hidden_s,
        waiting_s=hidden_waiting_s,
    ),
}
"""All-reduces by name, in the order of the help. Of two that take equally long, the first is chosen."""


# Which all-reduce to run: one around the straggler where the delay is sure to pay for it, stock's elsewhere.

STOCK = "stock"
"""Name of the library's own all-reduce, which waits for all ranks."""
LEAST_GAIN = 0.05
"""Minimum fraction of stock's time that a choice must save by the model; less is within the error of measurements."""


class AlgorithmChoice(NamedTuple):
    """An algorithm for the first bytes of a buffer. Stock's algorithm sums the remaining bytes afterwards."""

    algorithm: str
    """`STOCK`, or a name in `ALGORITHMS`."""
    nbytes: int
    exposed_s: float
    """Predicted exposed time of the whole buffer, in seconds."""


def choose(ranks: int, nbytes: int, wire: AllReduceWire, delay_s: float) -> AlgorithmChoice:
    """Return the choice with the least exposed time for one buffer, if it saves `LEAST_GAIN`; else stock's algorithm
    for all of it.

    `delay_s`: seconds by which the same rank is certain to arrive after all others; 0 if uncertain. An algorithm gets
    no more bytes than it can reduce during the delay.
    """
    stock = AlgorithmChoice(STOCK, nbytes, stock_s(ranks, nbytes, wire))
    best = stock._replace(exposed_s=(1 - LEAST_GAIN) * stock.exposed_s)
    if ranks < 3:
        return stock
    for name, algorithm in ALGORITHMS.items():
        if not algorithm.supports(ranks):
            continue
        part = int(min(nbytes, overlapped_nbytes(algorithm, ranks, wire, delay_s)))
        if part == 0:
            continue
        exposed_s = algorithm.exposed_s(ranks, part, wire, delay_s)
        if part < nbytes:
            exposed_s += stock_s(ranks, nbytes - part, wire)
        if exposed_s < best.exposed_s:
            best = AlgorithmChoice(name, part, exposed_s)
    return stock if best.algorithm == STOCK else best


def overlapped_nbytes(algorithm: Algorithm, ranks: int, wire: AllReduceWire, delay_s: float) -> float:
    """Return the bytes whose reduction without the straggler ends before it arrives; infinite if bytes cost nothing.

    Without latencies that is delay (ranks - 1) / ((ranks - 2) byte_s) for StragglAR, and half of it for the hidden
    all-reduce.
    """
    left_s = delay_s - algorithm.waiting_s(ranks, 0, wire)
    if left_s <= 0:
        return 0.0
    byte_s = algorithm.waiting_s(ranks, 1, wire._replace(latency_s=0.0))
    return left_s / byte_s if byte_s else math.inf
