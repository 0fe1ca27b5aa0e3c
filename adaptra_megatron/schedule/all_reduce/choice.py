# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce to run: StragglAR or the hidden one where the delay is sure to pay for it, stock's elsewhere."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from adaptra_megatron.schedule.all_reduce.costs import Wire, hidden_s, stock_s, stragglar_s
from adaptra_megatron.schedule.all_reduce.stragglar import has_stragglar


class Algorithm(Enum):
    """How gradients of replicas are summed up."""

    STOCK = "stock"
    STRAGGLAR = "stragglar"
    HIDDEN = "hidden"


LEAST_GAIN = 0.05
"""Fraction of stock's time that must be saved, by the model: less is within what measurements are wrong by."""


class Choice(NamedTuple):
    """An algorithm for the first bytes of a buffer. Stock's sums up the others, behind them."""

    algorithm: Algorithm
    nbytes: int
    exposed_s: float
    """Time of the whole buffer, by the model."""


def choose(ranks: int, nbytes: int, wire: Wire, delay_s: float) -> Choice:
    """The choice that exposes the least for one buffer, if it saves `LEAST_GAIN`; else stock's for all of it.

    `delay_s`: how much later than all others the same rank is sure to come; 0 if that is in doubt. No algorithm gets
    more bytes than the delay hides the work on.
    """
    stock = Choice(Algorithm.STOCK, nbytes, stock_s(ranks, nbytes, wire))
    best = stock._replace(exposed_s=(1 - LEAST_GAIN) * stock.exposed_s)
    if ranks < 3:
        return stock
    for algorithm in (Algorithm.STRAGGLAR, Algorithm.HIDDEN):
        if algorithm is Algorithm.STRAGGLAR and not has_stragglar(ranks):
            continue
        part = int(min(nbytes, hidden_nbytes(algorithm, ranks, wire, delay_s)))
        if part == 0:
            continue
        exposed_s = (stragglar_s if algorithm is Algorithm.STRAGGLAR else hidden_s)(ranks, part, wire, delay_s)
        if part < nbytes:
            exposed_s += stock_s(ranks, nbytes - part, wire)
        if exposed_s < best.exposed_s:
            best = Choice(algorithm, part, exposed_s)
    return stock if best.algorithm is Algorithm.STOCK else best


def hidden_nbytes(algorithm: Algorithm, ranks: int, wire: Wire, delay_s: float) -> float:
    """The bytes whose reduction without the straggler ends before it comes; infinite where bytes cost nothing.

    For StragglAR delay (ranks - 1) / ((ranks - 2) byte_s), without latencies, and half of it for the hidden all-reduce.
    """
    rounds = (ranks - 2) * (2 if algorithm is Algorithm.HIDDEN else 1)
    left_s = delay_s - rounds * wire.latency_s
    if left_s <= 0:
        return 0.0
    return math.inf if wire.byte_s == 0 else left_s * (ranks - 1) / (rounds * wire.byte_s)
