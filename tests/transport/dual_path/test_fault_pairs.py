# SPDX-License-Identifier: Apache-2.0
"""Two faults of a link at once; what they are and what the ranks check is in pair_ranks.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

RANKS = str(Path(__file__).parents[1] / "ranks" / "pair_ranks.py")
FAULTS = ("ring-spoilt", "delegate-killed", "host-dead", "device-dead", "store-hung", "store-dead", "rank-stopped")
PAIRS = list(itertools.combinations_with_replacement(FAULTS, 2))
CHOSEN = {
    "tcp": ("host-dead@0+device-dead@1", "delegate-killed@0+rank-stopped@1"),
    "shm": ("device-dead@0+store-hung@0", "ring-spoilt@0+rank-stopped@1"),
}


@pytest.mark.parametrize("transport", CHOSEN)
def test_chosen_pairs_of_faults(start_ranks: Callable[..., object], transport: str) -> None:
    start_ranks(2, [RANKS, transport, "2", *CHOSEN[transport]], timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_every_pair_of_faults(start_ranks: Callable[..., object], transport: str, first: str, second: str) -> None:
    """At both ends of the link, and at one."""
    pairs = [f"{first}@0+{second}@1", *([f"{first}@0+{second}@0"] if first != second else [])]
    start_ranks(2, [RANKS, transport, "30", *pairs], timeout_s=180.0)
