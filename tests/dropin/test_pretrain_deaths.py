# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, goes on when a rank dies."""

from __future__ import annotations

import functools
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretrain import MOCK_DATA, NO_DROPOUT, needs_megatron_lm, pretrain
from support.processes import RankResult

from campaigns.dying_trainings import BACK, KILLED, dumped, last
from testing.jobs.fault_tolerant_jobs import run_with_failures
from testing.results import relative_distances
from testing.training.checkpointing import LATEST, unreadable

pytestmark = needs_megatron_lm

ITERATIONS, RANKS = 8, 4
LAYOUT = ("--pipeline-model-parallel-size", "2", "--train-iters", str(ITERATIONS), "--global-batch-size", "8")
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce")
OURS = ("--adaptra", "--adaptra-reroute", "failures")
SELDOM = ("--log-interval", "100", "--exit-signal-handler", "--distributed-timeout-seconds-after-init", "120")
"""Stock logs a process's first iteration whatever the interval, and sets timeouts after it: all ranks meet for both."""
LOADING = ("--save-interval", "1", "--use-checkpoint-opt-param-scheduler")
"""With --save and --load, as most jobs: the job begins from nothing, and a process that is started again finds more."""


@pytest.mark.parametrize("dying", [0, 3])
def test_the_numbers_are_those_of_stock_up_to_rounding(dying: int, tmp_path: Path) -> None:
    """Ranks: replicas innermost, then stages; both a first stage, which reads tokens, and a last one, whose rank writes
    the log. Losses of a rank that dies after its commit are in no sum of losses."""
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT)
    pretrain(RANKS, tmp_path / "stock", *same)
    results = pretrain_with_death(RANKS, tmp_path / "ours", *same, death=f"{dying}:3:+15")
    assert [result.returncode for result in results] == [KILLED if rank == dying else 0 for rank in range(RANKS)]
    for rank in set(range(RANKS)) - {dying}:
        check_near(dumped(tmp_path / "stock", rank), dumped(tmp_path / "ours", rank))
    assert f" iteration {ITERATIONS:8}/" in results[2 if dying == 3 else 3].output


@pytest.mark.parametrize("dying", [0, 3])
@pytest.mark.parametrize(
    "flags", [(), OVERLAPPED, (*OVERLAPPED, "--num-virtual-stages-per-pipeline-rank", "2"), SELDOM, LOADING]
)
def test_a_rank_that_is_started_again_goes_on_where_the_others_are(
    dying: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where its datasets take longer to build than the others would wait for it."""
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT, *flags)
    pretrain(RANKS, tmp_path / "stock", *same)
    saved = str(tmp_path / "saved")
    ours = (*same, "--save", saved, "--load", saved) if flags == LOADING else same
    results = pretrain_with_return(
        RANKS, tmp_path / "ours", *ours, death=f"{dying}:2:+15", returned_at=4, emulated=("--emulate-data-ms", "5000")
    )
    assert not any("not admitted" in result.output for result in results)
    check_all_near(RANKS, tmp_path, later=[dying])


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)])
def test_checkpoints_in_the_background_are_complete_or_given_up(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The one of iteration 4 is under way as rank 1 dies; it comes back while the early one may be. Plans of ranks'
    parts are kept from one save to the next, by those that have lived that long alone. Stock goes on from the last."""
    saved = tmp_path / "saved"
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT, *flags)
    background = ("--async-save", "--ckpt-assume-constant-structure", "--use-persistent-ckpt-worker")
    results = pretrain_with_return(
        RANKS,
        tmp_path / "ours",
        *(*same, *background, "--save", str(saved), "--save-interval", "4"),
        death="1:4:+15",
        returned_at=6,
        emulated=("--emulate-write-ms", "10000"),
    )
    assert "it is given up, the one before it stays the newest" in results[0].output
    assert (saved / LATEST).read_text() == str(ITERATIONS)
    assert not unreadable(saved)
    if flags:
        return  # Megatron's distributed optimizer does not load the state of torch's Adam
    same = (*same, "--train-iters", "10")
    pretrain(RANKS, tmp_path / "stock", *same)
    pretrain(RANKS, tmp_path / "goes-on", *same, "--load", str(saved), "--override-opt-param-scheduler")
    check_all_near(RANKS, tmp_path, "goes-on", later=range(RANKS))


def test_experts_that_span_replicas_survive_failures(tmp_path: Path) -> None:
    """Ranks: the two that share experts innermost, then replicas, then stages. The logged auxiliary loss is stock's.
    A job of all ranks goes on from the checkpoint, in which each rank's random states would be missing."""
    experts = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--disable-bias-linear")
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT, *experts, "--moe-aux-loss-coeff", "1e-2", "--train-iters", "5")
    stock = pretrain(8, tmp_path / "stock", *same)
    saving = ("--save-interval", "4", "--save", str(tmp_path / "saved"))
    ours = pretrain_with_death(8, tmp_path / "ours", *same, *saving, death="1:2:+15")
    assert [result.returncode for result in ours] == [1, KILLED, *[0] * 6]
    for rank in range(2, 8):
        check_near(dumped(tmp_path / "stock", rank), dumped(tmp_path / "ours", rank))
    logged = [re.findall(r"load_balancing_loss: ([0-9.E+-]+)", each[-1].output) for each in (stock, ours)]
    losses = [[float(each) for each in found] for found in logged]
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    (tmp_path / "saved" / LATEST).write_text("4")
    pretrain(8, tmp_path / "goes-on", *same, "--load", str(tmp_path / "saved"))
    check_all_near(8, tmp_path, "goes-on", later=range(8))


def test_a_rank_without_parameters_of_a_group_that_others_have_comes_back(tmp_path: Path) -> None:
    """The middle one of three stages has neither the embedding nor the output layer, which have rates of their own."""
    same = (*LAYOUT, "--pipeline-model-parallel-size", "3", "--num-layers", "3", *MOCK_DATA, *NO_DROPOUT)
    same = (*same, "--decoupled-lr", "5e-4", "--untie-embeddings-and-output-weights")
    pretrain(6, tmp_path / "stock", *same)
    pretrain_with_return(6, tmp_path / "ours", *same, death="2:2:+15", returned_at=4)
    check_all_near(6, tmp_path, later=[2])


def test_a_rank_that_is_back_counts_samples_and_operations_as_the_others(tmp_path: Path) -> None:
    """Batches double after 4 iterations, in the one in which rank 0, which writes the checkpoint, is back."""
    ramp = ("--global-batch-size", "8", "--rampup-batch-size", "4", "4", "16", "--train-samples", "48")
    training = ("--micro-batch-size", "1", *ramp, "--lr", "1e-3", "--lr-decay-style", "constant", "--log-interval", "1")
    same = ("--pipeline-model-parallel-size", "2", *MOCK_DATA, *NO_DROPOUT, "--eval-iters", "0", "--eval-interval", "9")
    saving = ("--save-interval", str(ITERATIONS), "--save")
    pretrain(RANKS, tmp_path / "stock", *same, *saving, str(tmp_path / "stock-saved"), training=training)
    ours = (*same, *saving, str(tmp_path / "saved"))
    pretrain_with_return(RANKS, tmp_path / "ours", *ours, death="0:2:+15", returned_at=5, training=training)
    counts = [_counts(tmp_path / saved / f"iter_{ITERATIONS:07}") for saved in ("stock-saved", "saved")]
    assert counts[0] == counts[1]
    assert all(counts[0])


def _counts(checkpoint: Path) -> tuple[int, float]:
    found = torch.load(checkpoint / "common.pt", weights_only=False)
    return found["args"].consumed_train_samples, found["num_floating_point_operations_so_far"]


def pretrain_with_death(
    ranks: int, directory: Path, *flags: str, death: str, emulated: tuple[str, ...] = (), restarts: int = 0, **how: Any
) -> list[RankResult]:
    """Run pretrain_gpt.py with recovery. `death`: rank, iteration and when in it (--emulate-death)."""
    emulated = ("--emulate-death", death, *emulated)
    run = functools.partial(run_with_failures, restarts=restarts)
    return pretrain(ranks, directory, *flags, *OURS, emulated=emulated, run=run, CUDA_DEVICE_MAX_CONNECTIONS="8", **how)


def pretrain_with_return(
    ranks: int, directory: Path, *flags: str, death: str, returned_at: int, emulated: tuple[str, ...] = (), **how: Any
) -> list[RankResult]:
    """Do as `pretrain_with_death`; the rank is started again, and iteration `returned_at` waits for it."""
    emulated = ("--emulate-wait-for-arrivals", str(returned_at), *emulated)
    results = pretrain_with_death(
        ranks, directory, *flags, death=death, emulated=emulated, restarts=1, timeout_s=280.0, **how
    )
    assert [result.returncode for result in results] == [0] * ranks
    assert BACK in results[int(death.partition(":")[0])].output
    return results


def check_all_near(ranks: int, directory: Path, name: str = "ours", *, later: Container[int]) -> None:
    """Compare all ranks with stock's. Those that began `later` have the iterations since then alone."""
    for rank in range(ranks):
        stock, ours = dumped(directory / "stock", rank), dumped(directory / name, rank)
        check_near(last(stock, ours) if rank in later else stock, ours)


def check_near(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    distances = relative_distances(stock, ours)
    assert max(share for name, share in distances.items() if name != "losses") <= 1e-5, distances
    assert distances.get("losses", 0.0) <= 1e-2
