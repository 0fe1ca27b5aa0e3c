# SPDX-License-Identifier: Apache-2.0
"""Training on sequences of varied lengths, whose micro-batches are swapped and routed: the numbers of stock."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, run_variants

ITERATIONS, ONSET, MICRO_BATCHES, RANKS = 10, 2, 6, 4
TRAINING = (
    "--pipeline-model-parallel-size 2 --hidden-size 32 --seq-length 32 --mock-data --mock-data-padded "
    f"--variable-seq-lengths --no-gradient-accumulation-fusion --global-batch-size {MICRO_BATCHES * RANKS // 2} "
    f"--train-iters {ITERATIONS} --emulate-compute-ms 24,24,24"
)
REROUTED = (
    "--adaptra --adaptra-reroute stragglers --adaptra-host-transport shm --adaptra-max-in-flight 8 "
    "--emulate-prompt-planner "
    f"--emulate-slow-cell 1.1:3,from={ONSET}"
)
CASES = {
    "experts": (True, "--num-layers 2 --num-experts 2"),
    "dense": (True, "--num-layers 2"),
    "distributed": (
        True,
        "--num-layers 2 --use-distributed-optimizer --overlap-grad-reduce --calculate-per-token-loss",
    ),
    "interleaved": (False, "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
}
"""By name: whether what is swapped can be routed as well, and the flags of the training."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "experts" else pytest.mark.slow) for name in CASES]
)
def test_swapped_and_routed_training_is_training(case: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """Micro-batches are swapped from the first iteration on, and routed as well once a cell has turned slow."""
    routable, flags = CASES[case]
    stock = Variant("stock", tuple(f"{TRAINING} {flags}".split()))
    ours = Variant("ours", (*stock.argv, *REROUTED.split()), like="stock", nearly=True)
    report = run_variants(RANKS, [stock, ours], timeout_s=280, server=fork_server, directory=tmp_path)[1]
    assert all(rank["swapped_micro_batches"] >= ITERATIONS / 2 for rank in report.adaptra)
    assert all(bool(rank["routed_iterations"]) == routable for rank in report.adaptra)
    assert report.distances.keys() >= {"losses", "grad norms", "parameters"}
    assert max(report.distances.values()) <= 1e-5, report.distances
    # Ranks: replicas innermost, then stages.
    assert report.fingerprints[::2] == report.fingerprints[1::2], "replicas differ"
