# SPDX-License-Identifier: Apache-2.0
"""Promise P1 with every message on the host path: losses, parameters and optimizer state are bitwise stock's."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.emulation.fork_server import ForkServer
from adaptra_megatron.emulation.variants import Variant, check_equal, run_variants

ITERATIONS = 12
MODEL = "--mock-data --no-gradient-accumulation-fusion --eval-iters 1 --eval-interval 6"
LAYOUTS = {
    "pp2-bf16": (2, "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 8 --bf16"),
    "pp3-vpp2": (
        3,
        "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2 --num-layers 6 "
        "--global-batch-size 6",
    ),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 16 --overlap-grad-reduce"),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitwise_equal_to_stock_over_the_host_path(layout: str, tmp_path: Path, fork_server: ForkServer) -> None:
    world_size, flags = LAYOUTS[layout]
    arguments = (*MODEL.split(), *flags.split(), "--train-iters", str(ITERATIONS))
    variants = [Variant("stock", arguments)]
    for path in ("shm", "tcp", "auto"):
        host = ("--adaptra", "--adaptra-host-transport", path)
        variants.append(Variant(path, (*arguments, *host), like="stock"))
    reports = run_variants(world_size, variants, timeout_s=140, server=fork_server, directory=tmp_path)
    check_equal(reports)
    for report in reports[1:]:
        assert len(report.losses) == ITERATIONS
        assert report.losses[-1] < report.losses[0]
        for rank in report.adaptra:
            assert rank["transports"] == ["HostTransport"]
            assert rank["training_iterations"] == ITERATIONS
