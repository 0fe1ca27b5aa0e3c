# SPDX-License-Identifier: Apache-2.0
"""Links with two paths between real processes; what the ranks check is in dual_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RANKS = str(Path(__file__).parents[1] / "ranks" / "dual_ranks.py")
TIMEOUT_S = 60.0


HOST_PATHS = (("device_first", "switching", "measured"), ("host_dies",))
"""How the host path carries messages, and dies, is its wire's affair; all else is not, and is the same over both."""
OTHERS = (
    ("device_silent", "device_raises"),
    ("device_ends",),
    ("store_stops", "store_dies"),
    ("both_die", "both_die_silently"),
)
CASES = [
    *((transport, names) for names in HOST_PATHS for transport in ("shm", "tcp")),
    *(("shm", names) for names in OTHERS),
    *(pytest.param("tcp", names, marks=pytest.mark.slow) for names in OTHERS),
]


@pytest.mark.parametrize(
    ("transport", "scenarios"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_links_with_two_paths(start_ranks: Callable[..., object], transport: str, scenarios: tuple[str, ...]) -> None:
    start_ranks(2, [RANKS, transport, *scenarios], timeout_s=TIMEOUT_S)
