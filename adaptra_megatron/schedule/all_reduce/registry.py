# SPDX-License-Identifier: Apache-2.0
"""All-reduces around a straggler, by their names in --adaptra-gradient-sync. A new one is a module, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adaptra_megatron.schedule.all_reduce.costs import (
    MOST_CHUNKS,
    Wire,
    chain_chunks,
    hidden_s,
    hidden_waiting_s,
    stragglar_s,
    stragglar_waiting_s,
)
from adaptra_megatron.schedule.all_reduce.rings import hidden
from adaptra_megatron.schedule.all_reduce.rounds import AllReduce
from adaptra_megatron.schedule.all_reduce.stragglar import MOST_RANKS, has_stragglar, stragglar

_CHAIN_CHUNK_NBYTES = 1 << 20
"""Chunks of a hidden all-reduce's chain, where nothing has been measured."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One of them, for all that choose it, run it and tell of it."""

    plan: Callable[[int, int], AllReduce]
    """Makes its rounds for so many ranks, the last of which is the straggler, and so many chunks."""
    chunks: Callable[[int, int, Wire | None], int]
    """Says in how many chunks so many ranks sum up so many bytes. Without a wire nothing has been measured yet."""
    exposed_s: Callable[[int, float, Wire, float], float]
    """Takes ranks, bytes, wire and delay: see `costs`."""
    waiting_s: Callable[[int, float, Wire], float]
    """Gives the seconds of what is done without the straggler: a time for each message, and a time for each byte."""
    help: str
    """Says what it does, behind its name in the help of the flag."""
    supports: Callable[[int], bool] = lambda ranks: True
    """Says whether there is a plan for so many ranks."""
    needs: str = ""
    """Says which numbers of ranks these are."""


def _chunks_of_chain(ranks: int, nbytes: int, wire: Wire | None) -> int:
    if wire is None:
        return min(MOST_CHUNKS, -(-nbytes // _CHAIN_CHUNK_NBYTES))
    return chain_chunks(ranks, nbytes, wire)


ALGORITHMS: Mapping[str, Algorithm] = {
    "stragglar": Algorithm(
        plan=lambda ranks, chunks: stragglar(ranks),
        chunks=lambda ranks, nbytes, wire: ranks - 1,
        exposed_s=stragglar_s,
        waiting_s=stragglar_waiting_s,
        help="what can be summed up without the replica that came last before is, while the others wait for it",
        supports=has_stragglar,
        needs=f"at most {MOST_RANKS}, or a power of two",
    ),
    "hidden": Algorithm(
        plan=hidden,
        chunks=_chunks_of_chain,
        exposed_s=hidden_s,
        waiting_s=hidden_waiting_s,
        help="the same with another algorithm, for delays longer than an all-reduce",
    ),
}
"""In the order of the help; of two that take as long, the first one is chosen."""
