# SPDX-License-Identifier: Apache-2.0
"""Links with two paths between real processes; what the ranks check is in dual_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RANKS = str(Path(__file__).with_name("dual_ranks.py"))
TIMEOUT_S = 60.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "scenarios",
    [
        ("device_first", "switching", "measured"),
        ("device_silent", "device_raises"),
        ("device_ends",),
        ("host_dies",),
        ("store_stops", "store_dies"),
        ("both_die",),
    ],
    ids=lambda names: "-".join(names),
)
def test_links_with_two_paths(start_ranks: Callable[..., object], transport: str, scenarios: tuple[str, ...]) -> None:
    start_ranks(2, [RANKS, transport, *scenarios], timeout_s=TIMEOUT_S)
