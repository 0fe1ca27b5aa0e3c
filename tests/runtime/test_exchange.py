# SPDX-License-Identifier: Apache-2.0
"""Measurements, decisions and clocks between real processes. What the ranks check is in exchange_ranks.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from support.processes import RankResult

from adaptra_megatron.runtime.clocks import boot_identity

RANKS = str(Path(__file__).with_name("exchange_ranks.py"))


def test_clocks_are_related_and_decisions_reach_everybody(start_ranks: Callable[..., list[RankResult]]) -> None:
    start_ranks(3, [RANKS, "relate_clocks", "decide", "fail_to_plan"], timeout_s=60)


def test_a_dead_rank_is_an_error_on_all_others(start_ranks: Callable[..., list[RankResult]]) -> None:
    results = start_ranks(3, [RANKS, "lose_a_rank"], timeout_s=60, check=False, stop_on_failure=False)
    assert results[2].returncode == -signal.SIGKILL
    for result in results[:2]:
        assert result.returncode == 0, result.output
        assert "survived" in result.output


def test_ranks_of_one_machine_share_its_boot() -> None:
    assert boot_identity() == boot_identity()
    assert len(boot_identity()) == 36
