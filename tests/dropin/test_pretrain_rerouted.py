# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, whose micro-batches flow around a slow cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretrain import MOCK_DATA, NO_DROPOUT, needs_megatron_lm, pretrain, what_ran

from testing.results import fingerprint, relative_distances

pytestmark = needs_megatron_lm

ITERATIONS, RANKS = 14, 4
LAYOUT = ("--pipeline-model-parallel-size", "2", "--train-iters", str(ITERATIONS), "--global-batch-size", "12")
COMPUTE = ("--emulate-compute-ms", "20,20,20")
REROUTED = ("--adaptra", "--adaptra-reroute", "stragglers")


@pytest.mark.parametrize("slow_cell", ["1.0", "0.1"])
def test_the_numbers_are_those_of_stock_up_to_rounding(slow_cell: str, tmp_path: Path) -> None:
    """The first stage reads the tokens of other replicas' micro-batches, the last one their labels. Ranks: replicas
    innermost, then stages; losses are the last stage's."""
    same = (*LAYOUT, *MOCK_DATA, *NO_DROPOUT)
    pretrain(RANKS, tmp_path / "stock", *same)
    slow = (*COMPUTE, "--emulate-slow-cell", f"{slow_cell}:3,from=3")
    pretrain(RANKS, tmp_path / "ours", *same, *REROUTED, emulated=slow)
    for rank in range(RANKS):
        assert what_ran(tmp_path / "ours", rank)["adaptra"]["routed_iterations"] >= 3
        distances = relative_distances(dumped(tmp_path / "stock", rank), dumped(tmp_path / "ours", rank))
        assert distances.keys() == {"grad norms", "parameters"} | ({"losses"} if rank >= RANKS // 2 else set())
        assert max(distances.values()) <= 1e-5, distances
    for stage in range(2):
        first, second = (dumped(tmp_path / "ours", 2 * stage + replica) for replica in range(2))
        assert fingerprint(parameters(first)) == fingerprint(parameters(second))


def dumped(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    """What a rank came to."""
    found: dict[str, Any] = torch.load(directory / f"rank{rank}.pt", weights_only=True)
    return found["tensors"]


def parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters alone."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("parameter ")}
