# SPDX-License-Identifier: Apache-2.0
"""A collective inside of actions with replicas that have orders of their own is refused, not waited in for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult

SCRIPT = str(Path(__file__).with_name("meeting_ranks.py"))
TRAINING = (
    "--pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 32 --seq-length 16 --mock-data --train-iters 2 "
    "--global-batch-size 8 --no-gradient-accumulation-fusion --overlap-grad-reduce --use-distributed-optimizer "
    "--overlap-param-gather --adaptra"
)
"""Two replicas of two stages, whose own reductions and gatherings run inside of actions, too."""
REFUSED = {"loss": "a forward", "forward": "a forward", "backward": "a backward"}
PEERS = ("0, 1", "2, 3")
"""Ranks of each stage."""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("where", REFUSED)
def test_what_meets_other_replicas_is_refused_by_name(where: str, start_ranks: Callable[..., list[RankResult]]) -> None:
    results = start_ranks(4, [SCRIPT, where, *TRAINING.split()], timeout_s=80, check=False, stop_on_failure=False)
    refused = rf"{REFUSED[where]} calls \w+ over ranks ({'|'.join(PEERS)}) \(meet in {re.escape(SCRIPT)}, line \d+\)"
    assert all(result.returncode > 0 for result in results)
    # A rank may still be in the gather of the first micro-batch, let through, as its peer refuses the second and ends.
    assert any(re.search(refused, result.output) for result in results), [result.output for result in results]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("where", "flags"), [("once", ""), ("loss", "--adaptra-policy observe")])
def test_what_harms_no_order_runs(where: str, flags: str, start_ranks: Callable[..., list[RankResult]]) -> None:
    results = start_ranks(4, [SCRIPT, where, *TRAINING.split(), *flags.split()], timeout_s=80)
    assert "losses [" in results[-1].output
