# SPDX-License-Identifier: Apache-2.0
"""StragglAR's all-reduce (arXiv 2505.23523): what can be reduced without the straggler is, while the others wait."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from adaptra_megatron.schedule.all_reduce.cyclic import cyclic_rounds, least_rounds
from adaptra_megatron.schedule.all_reduce.powers_of_two import rounds_of_power
from adaptra_megatron.schedule.all_reduce.rings import reduce_scatter, require_ranks
from adaptra_megatron.schedule.all_reduce.rounds import AllReduce, Phase
from adaptra_megatron.schedule.errors import ScheduleError

MOST_RANKS = 64
"""What there are tables for; powers of two have no limit."""


def stragglar(ranks: int) -> AllReduce:
    """StragglAR for `ranks` ranks: a reduce-scatter of all but the straggler while it is away, then exchanges.

    Chunk c goes to rank c in the reduce-scatter, and in round c after the straggler's arrival both complete it: rank c
    adds what the straggler has, and the straggler what rank c has. All else are copies of complete chunks. Takes
    `stragglar_rounds` rounds after the arrival. Raises ScheduleError where `has_stragglar` says no.
    """
    _require_table(ranks)
    fast = ranks - 1
    rounds = rounds_of_power(ranks) if ranks & fast == 0 else cyclic_rounds(ranks, *_tables()[ranks])
    return AllReduce(ranks, Phase(fast, reduce_scatter(fast)), Phase(fast, rounds))


def has_stragglar(ranks: int) -> bool:
    """Return whether there is a schedule for so many: for 2 to 64, and for powers of two."""
    return ranks >= 2 and (ranks <= MOST_RANKS or ranks & (ranks - 1) == 0)


def stragglar_rounds(ranks: int) -> int:
    """Rounds after the arrival, of which there can be no fewer: ranks + ceil(log2(ranks)) - 2.

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
    """Ages and tail (see `cyclic_rounds`) by number of ranks, made by scripts/search_all_reduce_tables.py."""
    lines = files(__package__).joinpath("tables.csv").read_text().splitlines()
    return {
        int(row["ranks"]): (
            tuple(int(digit, 16) for digit in row["ages"]),
            tuple(tuple(-1 if digit == "-" else int(digit, 16) for digit in each) for each in row["tail"].split()),
        )
        for row in csv.DictReader(lines)
    }
