# SPDX-License-Identifier: Apache-2.0
"""Replicas that follow one list of arrivals come to the same updates, and name the one that is gone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult

RANKS = str(Path(__file__).with_name("update_log_ranks.py"))
REPLICAS, VICTIM, UPDATES = 3, 1, 24
StartRanks = Callable[..., list[RankResult]]


def said(result: RankResult) -> str:
    (line,) = (line for line in result.output.splitlines() if line.startswith("RESULT "))
    return line.removeprefix("RESULT ")


@pytest.mark.timeout(120)
def test_all_follow_to_the_same_updates_and_meet(start_ranks: StartRanks) -> None:
    """Who comes first is the machine's choice; that all agree is not."""
    handovers: list[set[tuple[int, int, int, bool]]] = []
    members = 0
    for result in start_ranks(REPLICAS, [RANKS, "goes-on"], timeout_s=100):
        made, _, carried = said(result).partition("] [")
        for update in ast.literal_eval(f"{made}]"):
            assert result.rank in update
            members += 1
        handovers.append({tuple(each) for each in ast.literal_eval(f"[{carried}")})
    assert members > UPDATES
    for rank, carried_by in enumerate(handovers):
        for carried in carried_by:
            _, source, target, gives = carried
            assert rank in (source, target)
            assert carried in handovers[target if rank == source else source]
            assert gives, "two of three wait for no late one"
    assert any(handovers), "no replica was ever late"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_replica_that_is_gone_is_named_by_all_others(start_ranks: StartRanks, how: str) -> None:
    """At once, whether it says that it leaves, as it does with an error, or is killed."""
    results = start_ranks(REPLICAS, [RANKS, how], timeout_s=50, check=False, stop_on_failure=False)
    for result in results:
        if result.rank == VICTIM:
            assert result.returncode == (-9 if how == "dies" else 0), result.output
            continue
        assert result.returncode == 0, result.output
        seconds, _, error = said(result).partition(" ")
        assert error.startswith(f"rank {result.rank}: no further updates are made without rank {VICTIM}: ")
        assert ("killed" if how == "dies" else "has left the training") in error
        assert float(seconds) < 10.0
