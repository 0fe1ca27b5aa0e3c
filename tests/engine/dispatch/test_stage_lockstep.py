# SPDX-License-Identifier: Apache-2.0
"""Who decides for the ranks of a stage that share collectives, and what happens when one of them is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from support.processes import RankResult

from adaptra_megatron.megatron.megatron_call import shared_groups

RANKS = str(Path(__file__).with_name("stage_team_ranks.py"))


@pytest.mark.parametrize("scenario", ["follow", "silent_leader", "give_up"])
def test_followers_hear_what_the_leader_decides(start_ranks: Callable[..., object], scenario: str) -> None:
    start_ranks(3, [RANKS, scenario], timeout_s=60)


@pytest.mark.parametrize(("scenario", "lost"), [("lose_the_leader", 1), ("lose_a_follower", 2)])
def test_the_rank_that_is_lost_is_named(start_ranks: Callable[..., list[RankResult]], scenario: str, lost: int) -> None:
    results = start_ranks(3, [RANKS, scenario], timeout_s=60, check=False, stop_on_failure=False)
    for result in results:
        if result.rank == lost:
            assert result.returncode == -signal.SIGKILL
        else:
            assert result.returncode == 0, result.output
            assert "survived" in result.output


@pytest.mark.parametrize(("experts", "expected"), [(None, [[4, 5], [4, 6]]), (8, [[4, 5], [4, 6], [4, 12]])])
def test_peers_are_those_of_the_groups_that_the_model_was_built_with(
    monkeypatch: pytest.MonkeyPatch, experts: int | None, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    groups = SimpleNamespace(tp=[4, 5], cp=[4, 6], dp_cp=[4, 6, 12, 14], ep=[4, 12])
    assert shared_groups(SimpleNamespace(num_moe_experts=experts), groups) == expected


def test_losses_and_scales_that_every_forward_reduces_over_replicas_join_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's router.py (global auxiliary loss) and Transformer Engine's delayed scaling."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    monkeypatch.setattr(parallel_state, "get_amax_reduction_group", lambda **keywords: [4, 5, 6, 7])
    groups = SimpleNamespace(tp=[4, 5], cp=[4], ep=[4], tp_dp_cp=[4, 5, 12, 13])
    balanced = SimpleNamespace(num_moe_experts=8, moe_router_load_balancing_type=["aux_loss", "global_aux_loss"])
    assert shared_groups(balanced, groups) == [[4, 5], [4], [4], [4, 5, 12, 13]]
    scaled = SimpleNamespace(num_moe_experts=None, fp8="hybrid", fp8_recipe="delayed")
    assert shared_groups(scaled, groups) == [[4, 5], [4], [4, 5, 6, 7]]
    scaled.fp8_recipe = "mxfp8"
    assert shared_groups(scaled, groups) == [[4, 5], [4]]
