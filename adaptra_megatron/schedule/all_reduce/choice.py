# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce to run: one around the straggler where the delay is sure to pay for it, stock's elsewhere."""

from __future__ import annotations

import math
from typing import NamedTuple

from adaptra_megatron.schedule.all_reduce.costs import Wire, stock_s
from adaptra_megatron.schedule.all_reduce.registry import ALGORITHMS, Algorithm

STOCK = "stock"
"""The name of what a library does, which waits for all ranks."""
LEAST_GAIN = 0.05
"""Fraction of stock's time that must be saved, by the model: less is within what measurements are wrong by."""


class Choice(NamedTuple):
    """An algorithm for the first bytes of a buffer. Stock's sums up the others, behind them."""

    algorithm: str
    """`STOCK`, or a name in `ALGORITHMS`."""
    nbytes: int
    exposed_s: float
    """Time of the whole buffer, by the model."""


def choose(ranks: int, nbytes: int, wire: Wire, delay_s: float) -> Choice:
    """The choice that exposes the least for one buffer, if it saves `LEAST_GAIN`; else stock's for all of it.

    `delay_s`: how much later than all others the same rank is sure to come; 0 if that is in doubt. No algorithm gets
    more bytes than the delay hides the work on.
    """
    stock = Choice(STOCK, nbytes, stock_s(ranks, nbytes, wire))
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
            best = Choice(name, part, exposed_s)
    return stock if best.algorithm == STOCK else best


def overlapped_nbytes(algorithm: Algorithm, ranks: int, wire: Wire, delay_s: float) -> float:
    """The bytes whose reduction without the straggler ends before it comes; infinite where bytes cost nothing.

    For StragglAR delay (ranks - 1) / ((ranks - 2) byte_s), without latencies, and half of it for the hidden all-reduce.
    """
    left_s = delay_s - algorithm.waiting_s(ranks, 0, wire)
    if left_s <= 0:
        return 0.0
    byte_s = algorithm.waiting_s(ranks, 1, wire._replace(latency_s=0.0))
    return left_s / byte_s if byte_s else math.inf
