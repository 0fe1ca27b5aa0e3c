# SPDX-License-Identifier: Apache-2.0
"""Activations that are offloaded come back for the backwards of the plan, whatever it is: bit for bit stock's."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

SHAPE = (
    "--bf16 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --seq-length 16 --mock-data "
    "--no-gradient-accumulation-fusion --train-iters 7 --eval-iters 1 --eval-interval 2"
)
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
COMBINED = "--num-experts 4 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --global-batch-size 16"
OFFLOADS = (
    "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj mlp_norm "
    "--adaptra --adaptra-max-in-flight 6 --adaptra-timeout-s 60 --emulate-compute-ms 6,6,6 --emulate-exact-times "
    "--emulate-prompt-planner --emulate-slow-link 0-1:latency_ms=40,from=3,path=both"
)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "jobs"),
    [
        (2, {"one chunk": "--global-batch-size 8", "chunks": f"{CHUNKS} --global-batch-size 8"}),
        (4, {"combined": f"{CHUNKS} {COMBINED}"}),
    ],
)
def test_offloaded_in_the_order_of_the_plan(
    ranks: int, jobs: dict[str, str], tmp_path: Path, fork_server: ForkServer
) -> None:
    wanted = [
        variant
        for name, flags in jobs.items()
        for variant in (
            Variant(name, tuple(f"{SHAPE} {flags}".split())),
            Variant(f"{name}, offloaded", tuple(f"{SHAPE} {flags} {OFFLOADS}".split()), like=name),
        )
    ]
    reports = run_variants(ranks, wanted, timeout_s=180, server=fork_server, directory=tmp_path)
    check_equal(reports)
    for report in (each for each in reports if each.adaptra):
        assert report.adaptra[0]["offload_records"] > 1, report.name
        assert all(rank["offloaded_bytes"] for rank in report.adaptra), report.name
        assert all(rank["split_weight_gradients"] for rank in report.adaptra), report.name
        assert len({fingerprint for _number, fingerprint in report.plans[0]}) > 1, "the plan changed"
