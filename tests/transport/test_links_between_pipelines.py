# SPDX-License-Identifier: Apache-2.0
"""Links between ranks of two pipelines, opened, closed and aborted while others carry messages: see link_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RANKS = str(Path(__file__).parent / "ranks" / "link_ranks.py")
TIMEOUT_S = 60.0


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scenarios",
    [
        ("opened_and_closed",),
        ("aborted_in_mid_message", "stale_messages"),
        pytest.param(("aborted_by_the_peer", "no_peer_there"), marks=pytest.mark.slow),
        pytest.param(("a_rank_dies",), marks=pytest.mark.slow),
    ],
    ids=lambda names: "-".join(names),
)
def test_links_between_pipelines(
    start_ranks: Callable[..., object], transport: str, scenarios: tuple[str, ...]
) -> None:
    start_ranks(4, [RANKS, transport, *scenarios], timeout_s=TIMEOUT_S)
