# SPDX-License-Identifier: Apache-2.0
"""Measurements, decisions and clocks between real processes. What the ranks check is in exchange_ranks.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port

RANKS = str(Path(__file__).with_name("exchange_ranks.py"))


def test_clocks_are_related_and_decisions_reach_all_ranks(start_ranks: Callable[..., list[RankResult]]) -> None:
    start_ranks(3, [RANKS, "relate_clocks", "decide", "fail_to_plan"], timeout_s=60)


def test_late_plans_and_late_ranks_hold_up_no_rank(start_ranks: Callable[..., list[RankResult]]) -> None:
    results = start_ranks(3, [RANKS, "plan_slowly", "lag_behind", "measure_late"], timeout_s=60)
    for result in results:
        assert "c10d" not in result.output, "a healthy run warns of its network"


@pytest.mark.parametrize(
    ("scenario", "lost", "survivors"),
    [
        ("lose_a_rank", 2, (0, 1)),
        ("lose_the_leader", None, (1, 2)),
        ("lose_the_store", 0, (1, 2)),
        ("lose_the_store_with_a_fixed_order", 0, (1, 2)),
    ],
)
def test_the_rank_that_is_lost(
    start_ranks: Callable[..., list[RankResult]], scenario: str, lost: int | None, survivors: tuple[int, ...]
) -> None:
    served_by_rank_0 = {"MASTER_PORT": str(free_port())} if scenario.startswith("lose_the_store") else {}
    argv = [RANKS, scenario]
    results = start_ranks(3, argv, timeout_s=60, env=served_by_rank_0, check=False, stop_on_failure=False)
    if lost is not None:
        assert results[lost].returncode == -signal.SIGKILL
    for rank in survivors:
        assert results[rank].returncode == 0, results[rank].output
        assert "survived" in results[rank].output
        assert results[rank].output.count("The order is fixed and stays") == scenario.endswith("fixed_order")
