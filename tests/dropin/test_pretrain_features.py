# SPDX-License-Identifier: Apache-2.0
"""Features of real runs, in Megatron-LM's own pretrain_gpt.py: each with the numbers of stock, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pretrain import (
    CHECKOUT,
    MOCK_DATA,
    NO_DROPOUT,
    TRAINING,
    compare_with_stock,
    needs_megatron_lm,
    pretrain,
    what_ran,
)
from support.processes import compare_dumps

pytestmark = needs_megatron_lm

PP2 = ("--pipeline-model-parallel-size", "2")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1", *NO_DROPOUT)
OVERLAP = ("--overlap-grad-reduce",)
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    "--disable-bias-linear",  # up to 0.15 the router's bias is not initialised: no two runs of stock are equal
)
COMBINED = ("--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type", "alltoall", "--bf16")

FEATURES = {
    "overlap-grad-reduce": (4, OVERLAP),
    "distributed-optimizer": (4, ("--use-distributed-optimizer",)),
    "overlap-param-gather": (4, ("--use-distributed-optimizer", *OVERLAP, "--overlap-param-gather")),
    "overlap-param-gather-interleaved": (
        4,
        ("--use-distributed-optimizer", *OVERLAP, "--overlap-param-gather", *CHUNKS),
    ),
    "recompute-selective": (2, ("--recompute-granularity", "selective")),
    "recompute-full": (
        2,
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "experts": (4, EXPERTS),
    "combined": (4, (*EXPERTS, *COMBINED, "--num-layers", "8", *CHUNKS, "--moe-shared-expert-intermediate-size", "32")),
    "untied-embeddings": (2, ("--untie-embeddings-and-output-weights",)),
    "uneven-layers": (2, ("--decoder-first-pipeline-num-layers", "1")),
    "micro-batch-groups": (2, (*CHUNKS, "--microbatch-group-size-per-virtual-pipeline-stage", "4")),
    "bf16": (2, ("--bf16",)),
    "loss-per-token": (4, ("--calculate-per-token-loss",)),
    "log-straggler": (2, ("--log-straggler",)),
    "rope-and-swiglu": (2, ("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm")),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_numbers_are_those_of_stock(feature: str, tmp_path: Path) -> None:
    ranks, arguments = FEATURES[feature]
    compare_with_stock(ranks, tmp_path, *PP2, *MOCK_DATA, *arguments)


@pytest.mark.parametrize("layers", ["0", "1"])
def test_full_recompute_of_some_layers_splits_backwards(layers: str, tmp_path: Path) -> None:
    """Of none at all, and of the first of each stage's two."""
    recompute = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", layers)
    compare_with_stock(2, tmp_path, *PP2, *MOCK_DATA, *recompute)
    for rank in range(2):
        assert what_ran(tmp_path / "ours", rank)["adaptra"]["split_weight_gradients"] > 0


def test_batch_size_rampup(tmp_path: Path) -> None:
    """Iterations of 4, 4, 6, 6 and then 8 micro-batches: the plan of each is made for its number."""
    by_samples = (*_without(TRAINING, "--train-iters", "--global-batch-size"), "--train-samples", "36", *_rampup())
    for name, flags in (("stock", ()), ("ours", ("--adaptra",))):
        pretrain(2, tmp_path / name, *PP2, *MOCK_DATA, *flags, training=by_samples)
    assert compare_dumps(tmp_path / "stock", tmp_path / "ours") > 10_000
    assert what_ran(tmp_path / "ours")["adaptra"]["training_iterations"] > 4


def _without(arguments: tuple[str, ...], *flags: str) -> tuple[str, ...]:
    """`arguments` but for these flags and their values."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return tuple(part for flag, value in pairs if flag not in flags for part in (flag, value))


def _rampup() -> tuple[str, ...]:
    """As this release of Megatron-LM has it: newer ones count in tokens, of 64 per sample."""
    settings = CHECKOUT / "megatron" / "training" / "config" / "training_config.py"
    if settings.is_file() and "step_batch_size_schedule" in settings.read_text():
        return ("--step-batch-size-schedule", "0:4 512:6 1280:8")
    return ("--global-batch-size", "8", "--rampup-batch-size", "4", "2", "16")


# With tied embeddings stock cannot save a model with multi-token prediction (seen with 0.16.1).
MTP = (
    *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
    "--untie-embeddings-and-output-weights",
)


class TestCheckpoints:
    @pytest.mark.parametrize("flags", [(), MTP], ids=["plain", "mtp"])
    def test_a_run_that_stops_and_resumes_ends_as_one_that_does_not(
        self, flags: tuple[str, ...], tmp_path: Path
    ) -> None:
        """Without dropout: with it, a run of stock that resumes on CPUs is not the one that does not, either."""
        saved, ours = tmp_path / "checkpoints", (*PP2, *MOCK_DATA, *NO_DROPOUT, *flags, "--adaptra")
        pretrain(2, tmp_path / "whole", *ours)
        stop = ("--save", str(saved), "--save-interval", "2", "--exit-interval", "2")
        pretrain(2, tmp_path / "first", *ours, *stop)
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
        pretrain(2, tmp_path / "second", *ours, "--load", str(saved))
        assert what_ran(tmp_path / "second")["adaptra"]["training_iterations"] == 2
        for rank in range(2):
            whole, second = (state(tmp_path / name, rank) for name in ("whole", "second"))
            assert whole.keys() == second.keys()
            assert [name for name in whole if not torch.equal(whole[name], second[name])] == []

    def test_checkpoints_of_stock_are_resumed_with_the_flag_and_the_other_way_round(self, tmp_path: Path) -> None:
        ways: dict[str, tuple[str, ...]] = {"stock": (), "ours": ("--adaptra",)}
        for name, flags in ways.items():
            stop = ("--save", str(tmp_path / f"{name}-saved"), "--save-interval", "2", "--exit-interval", "2")
            pretrain(2, tmp_path / name, *PP2, *MOCK_DATA, *flags, *stop)
        for name, flags in ways.items():
            for source in ways:
                load = ("--load", str(tmp_path / f"{source}-saved"))
                pretrain(2, tmp_path / f"{name}-from-{source}", *PP2, *MOCK_DATA, *flags, *load)
        for resumed in ("ours-from-stock", "stock-from-ours", "ours-from-ours"):
            assert compare_dumps(tmp_path / "stock-from-stock", tmp_path / resumed) > 10_000


def state(dump: Path, rank: int) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a rank."""
    tensors = torch.load(dump / f"rank{rank}.pt", weights_only=True)["tensors"]
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("parameter ", "optimizer state "))}
