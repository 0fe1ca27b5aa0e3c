# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, goes on when a rank dies."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from support.pretrain import MOCK_DATA, NO_DROPOUT, needs_megatron_lm, pretrain

from campaigns.dying_trainings import BACK, KILLED, dumped, last
from testing.jobs.fault_tolerant_jobs import run_with_failures
from testing.results import relative_distances

pytestmark = needs_megatron_lm

ITERATIONS, RANKS = 8, 4
LAYOUT = ("--pipeline-model-parallel-size", "2", "--train-iters", str(ITERATIONS), "--global-batch-size", "8")
OURS = ("--adaptra", "--adaptra-reroute", "failures")


@pytest.mark.parametrize("dying", [0, 3])
def test_the_numbers_are_those_of_stock_up_to_rounding(dying: int, tmp_path: Path) -> None:
    """Ranks: replicas innermost, then stages; both a first stage, which reads tokens, and a last one, whose rank writes
    the log. Losses of a rank that dies after its commit are in no sum of losses."""
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT)
    pretrain(RANKS, tmp_path / "stock", *same)
    emulated = ("--emulate-death", f"{dying}:3:+15")
    results = pretrain(
        RANKS,
        tmp_path / "ours",
        *same,
        *OURS,
        emulated=emulated,
        run=run_with_failures,
        CUDA_DEVICE_MAX_CONNECTIONS="8",
    )
    assert [result.returncode for result in results] == [KILLED if rank == dying else 0 for rank in range(RANKS)]
    for rank in set(range(RANKS)) - {dying}:
        check_near(dumped(tmp_path / "stock", rank), dumped(tmp_path / "ours", rank))


@pytest.mark.parametrize("dying", [0, 3])
@pytest.mark.parametrize(
    "flags", [(), ("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce")]
)
def test_a_rank_that_is_started_again_goes_on_where_the_others_are(
    dying: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT, *flags)
    pretrain(RANKS, tmp_path / "stock", *same)
    emulated = ("--emulate-death", f"{dying}:2:+15", "--emulate-wait-for-arrivals", "4")
    run = functools.partial(run_with_failures, restarts=1)
    ours = (*same, *OURS)
    results = pretrain(
        RANKS, tmp_path / "ours", *ours, emulated=emulated, run=run, timeout_s=280.0, CUDA_DEVICE_MAX_CONNECTIONS="8"
    )
    assert [result.returncode for result in results] == [0] * RANKS
    assert BACK in results[dying].output
    for rank in range(RANKS):
        stock, ours = dumped(tmp_path / "stock", rank), dumped(tmp_path / "ours", rank)
        check_near(last(stock, ours) if rank == dying else stock, ours)


def check_near(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    distances = relative_distances(stock, ours)
    assert max(share for name, share in distances.items() if name != "losses") <= 1e-5, distances
    assert distances.get("losses", 0.0) <= 1e-2
