# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, whose replicas do not wait for a slow one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretrain import MOCK_DATA, NO_DROPOUT, needs_megatron_lm, pretrain, what_ran
from support.processes import compare_dumps

pytestmark = needs_megatron_lm

ITERATIONS = 18
# Replicas meet where iterations are logged and where they evaluate.
SCHEDULE = (
    "--train-iters",
    str(ITERATIONS),
    "--log-interval",
    "12",
    "--eval-interval",
    "12",
    "--rerun-mode",
    "disabled",
)
MODE = ("--adaptra", "--adaptra-timeout-s", "100", "--adaptra-sync-mode")
ALIKE = ("--emulate-compute-ms", "5,5,5", "--emulate-exact-times")
SLOW = (*ALIKE, "--emulate-slow-cell", "1.0:5")
PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "dp3": (3, 3, ("--global-batch-size", "6")),
    "dp2-tp2": (4, 2, ("--tensor-model-parallel-size", "2")),
    "dp2-pp2": (4, 2, PP2),
    "dp2-pp2-vpp2": (4, 2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_replica_is_not_waited_for_and_without_one_the_numbers_are_those_of_stock(
    layout: str, tmp_path: Path
) -> None:
    ranks, replicas, arguments = LAYOUTS[layout]
    same = (*SCHEDULE, *arguments, *MOCK_DATA, *NO_DROPOUT)
    pretrain(ranks, tmp_path / "stock", *same)
    pretrain(ranks, tmp_path / "ours", *same, *MODE, "auto", emulated=ALIKE)
    assert compare_dumps(tmp_path / "stock", tmp_path / "ours") > 10_000
    for rank in range(ranks):
        assert what_ran(tmp_path / "ours", rank)["adaptra"]["updates"]["together"] == ITERATIONS

    pretrain(ranks, tmp_path / "slow", *same, *MODE, "x-order", emulated=SLOW)
    counted = [Counter(what_ran(tmp_path / "slow", rank)["adaptra"]["updates"]) for rank in range(ranks)]
    assert any(each["missed"] and each["given"] + each["late"] for each in counted), counted
    for each in counted:
        assert each["together"] + each["partial"] + each["missed"] == ITERATIONS, counted
    assert len({fingerprint(tmp_path / "slow", rank) for rank in range(ranks)}) == ranks // replicas


def fingerprint(directory: Path, rank: int) -> str:
    """Fingerprint of all parameters that a rank came to."""
    from testing.results import fingerprint

    found: dict[str, Any] = torch.load(directory / f"rank{rank}.pt", weights_only=True)["tensors"]
    return fingerprint({name: tensor for name, tensor in found.items() if name.startswith("parameter ")})
