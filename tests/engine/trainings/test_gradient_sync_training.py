# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients are summed up around a straggler: stock's up to rounding, and replicas equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, run_variants

ITERATIONS = 20
TRAINING = (
    "--mock-data --no-gradient-accumulation-fusion --num-layers 2 --hidden-size 32 --seq-length 16 "
    f"--lr 1e-4 --train-iters {ITERATIONS}"
)
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 4000"
SUMS = "--adaptra --adaptra-gradient-sync"
NEAR = 1e-6
"""Norm of all differences of parameters from stock's, as a share of that of the parameters."""


def check(
    replicas: int,
    flags: str,
    ways: dict[str, str],
    tmp_path: Path,
    server: ForkServer,
    *,
    ranks: int,
    used: dict[str, str],
) -> None:
    """Train as stock and in all ways. Each is near stock and has used its algorithm, and replicas are equal."""
    base = f"{TRAINING} --global-batch-size {4 * replicas} {flags}"
    variants = [Variant("stock", tuple(base.split()))]
    variants += [Variant(name, tuple(f"{base} {way}".split()), like="stock", nearly=True) for name, way in ways.items()]
    reports = run_variants(ranks, variants, timeout_s=180, server=server, directory=tmp_path)
    groups = ranks // replicas
    for report in reports[1:]:
        # Replicas of a shard are next to each other, or, with tensor parallelism, a group apart.
        assert len(set(report.fingerprints)) == groups, report.name
        assert report.elements_compared > 0
        assert report.distances["parameters"] < NEAR, report.distances
        for rank in report.adaptra:
            assert rank["gradient_sync"].get(used[report.name], 0) >= ITERATIONS, rank["gradient_sync"]


@pytest.mark.timeout(200)
def test_replicas_without_a_pipeline(tmp_path: Path, fork_server: ForkServer) -> None:
    """`auto` finds little that pays: replicas are about equally late, and buffers small."""
    ways = {
        "stragglar": f"{BUCKETS} {SUMS} stragglar",
        "hidden": f"--ddp-average-in-collective {SUMS} hidden",  # stock averages with NCCL alone
        "auto": f"{BUCKETS} {SUMS} auto",
    }
    used = {"stragglar": "stragglar", "hidden": "hidden", "auto": "stock"}
    check(3, "", ways, tmp_path, fork_server, ranks=3, used=used)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("replicas", "ranks", "flags"),
    [
        (4, 4, ""),
        (3, 6, "--pipeline-model-parallel-size 2"),
        (3, 6, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --bf16"),
        (3, 6, "--tensor-model-parallel-size 2"),
        (2, 4, "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
        (6, 6, "--use-distributed-optimizer --num-distributed-optimizer-instances 3"),
    ],
    ids=["4 replicas", "pipeline", "untied bf16", "tensor parallel", "chunks of 2 replicas", "3 instances"],
)
def test_layouts(replicas: int, ranks: int, flags: str, tmp_path: Path, fork_server: ForkServer) -> None:
    ways = {
        "stragglar": f"{BUCKETS} {SUMS} stragglar",
        "stragglar, at the end": f"{SUMS} stragglar",
        "hidden": f"{BUCKETS} {SUMS} hidden",
    }
    used = {name: name.partition(",")[0] for name in ways}
    check(replicas, flags, ways, tmp_path, fork_server, ranks=ranks, used=used)
