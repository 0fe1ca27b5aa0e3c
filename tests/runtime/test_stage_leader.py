# SPDX-License-Identifier: Apache-2.0
"""Who decides for the ranks of a stage that share collectives, and what happens when one of them is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.processes import RankResult

from adaptra_megatron.runtime import stage_leader
from adaptra_megatron.runtime.stage_leader import team_of

RANKS = str(Path(__file__).with_name("stage_team_ranks.py"))


@pytest.mark.parametrize("scenario", ["follow", "silent_leader"])
def test_followers_hear_what_the_leader_decides(start_ranks: Callable[..., object], scenario: str) -> None:
    start_ranks(3, [RANKS, scenario], timeout_s=60)


@pytest.mark.parametrize(("scenario", "lost"), [("lose_the_leader", 1), ("lose_a_follower", 2)])
def test_whoever_is_lost_is_named(start_ranks: Callable[..., list[RankResult]], scenario: str, lost: int) -> None:
    results = start_ranks(3, [RANKS, scenario], timeout_s=60, check=False, stop_on_failure=False)
    for result in results:
        if result.rank == lost:
            assert result.returncode == -signal.SIGKILL
        else:
            assert result.returncode == 0, result.output
            assert "survived" in result.output


def test_tensor_and_context_parallel_peers_are_one_team() -> None:
    # Two pipelines of two stages, each stage of 2 x 2 ranks: tensor-parallel pairs, context-parallel ones across them.
    stages = [range(first, first + 4) for first in range(0, 16, 4)]
    peers = [{rank ^ 1, rank ^ 2, rank} for rank in range(16)]
    for rank in range(16):
        assert team_of(rank, peers) == list(stages[rank // 4])


def test_experts_spread_over_replicas_join_the_teams_of_these() -> None:
    # Stage 0 of two replicas is ranks 0, 1 and 4, 5; experts are spread over 1 and 5 alone.
    peers = [{0, 1}, {0, 1, 5}, {2, 3}, {2, 3}, {4, 5}, {4, 5, 1}, {6, 7}, {6, 7}]
    assert [team_of(rank, peers) for rank in range(8)] == [
        [0, 1, 4, 5] if rank in (0, 1, 4, 5) else [rank - rank % 2, rank - rank % 2 + 1] for rank in range(8)
    ]


@pytest.mark.parametrize(("experts", "expected"), [(None, {4, 5, 6}), (8, {4, 5, 6, 12})])
def test_peers_are_those_of_the_groups_that_the_model_was_built_with(
    monkeypatch: pytest.MonkeyPatch, experts: int | None, expected: set[int]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    groups = SimpleNamespace(tp=[4, 5], cp=[4, 6], dp_cp=[4, 6, 12, 14], ep=[4, 12])
    call: Any = SimpleNamespace(groups=groups, config=SimpleNamespace(num_moe_experts=experts))
    assert stage_leader._peers(call) == expected


@given(
    st.integers(1, 12).flatmap(
        lambda size: st.lists(st.frozensets(st.integers(0, size - 1), min_size=1), max_size=6).map(
            lambda groups: (size, groups)
        )
    )
)
def test_every_rank_finds_the_same_team(case: tuple[int, list[frozenset[int]]]) -> None:
    size, groups = case
    peers = [{rank}.union(*(group for group in groups if rank in group)) for rank in range(size)]
    teams = [team_of(rank, peers) for rank in range(size)]
    for team in teams:
        assert all(teams[member] == team for member in team)
    for group in groups:
        assert len({tuple(teams[member]) for member in group}) == 1
