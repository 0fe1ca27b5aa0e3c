# SPDX-License-Identifier: Apache-2.0
"""Fewer micro-batches than stages, and groups of chunks that are not full, on any link: stock's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ITERATIONS, RANKS = 5, 4
TRAINING = f"--mock-data --no-gradient-accumulation-fusion --eval-iters 0 --num-layers 4 --train-iters {ITERATIONS}"
SLOW = "--adaptra --adaptra-host-transport shm --emulate-slow-link 0-1:latency_ms=20,from=2,path=both"
NOT_FULL = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12 "
    "--microbatch-group-size-per-virtual-pipeline-stage 4"
)
JOBS = {
    **{f"{number} of 4": f"--pipeline-model-parallel-size 4 --global-batch-size {number}" for number in (1, 2, 3)},
    "6 in groups of 4": NOT_FULL,
}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bitwise_equal_to_stock(tmp_path: Path, fork_server: ForkServer) -> None:
    variants = []
    for name, flags in JOBS.items():
        stock = (*TRAINING.split(), *flags.split())
        variants.append(Variant(name, stock))
        variants.append(Variant(f"{name}, healthy", (*stock, "--adaptra"), like=name))
        variants.append(Variant(f"{name}, slow", (*stock, *SLOW.split()), like=name))
    reports = run_variants(RANKS, variants, timeout_s=230, server=fork_server, directory=tmp_path)
    check_equal(reports)
    for report in reports:
        if report.adaptra:
            assert [rank["training_iterations"] for rank in report.adaptra] == [ITERATIONS] * RANKS
