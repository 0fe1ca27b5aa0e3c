# SPDX-License-Identifier: Apache-2.0
"""Promise P1 whichever path messages take: losses, parameters and optimizer state are bitwise stock's."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

ITERATIONS = 30
MODEL = "--mock-data --no-gradient-accumulation-fusion --eval-iters 1 --eval-interval 15"
LAYOUTS = {
    "pp2-bf16": (2, "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 8 --bf16"),
    "pp3-vpp2": (
        3,
        "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2 --num-layers 6 "
        "--global-batch-size 6",
    ),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 16 --overlap-grad-reduce"),
}
PATHS = [
    ("shm", "host", False),
    ("tcp", "host", False),
    ("auto", "device", False),
    ("shm", "device", True),
    ("tcp", "device", True),
]
"""Transport of the host path, the preferred path, and whether that changes all the time."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitwise_equal_to_stock_on_either_path(layout: str, tmp_path: Path, fork_server: ForkServer) -> None:
    world_size, shape = LAYOUTS[layout]
    arguments = (*MODEL.split(), *shape.split(), "--train-iters", str(ITERATIONS))
    variants = [Variant("stock", arguments)]
    for transport, path, flaps in PATHS:
        flags = ("--adaptra", "--adaptra-host-transport", transport, "--adaptra-path", path)
        # Else a busy machine may make a path look slow, and the other one is taken.
        flags += ("--emulate-path-flaps", "7") if flaps else ("--adaptra-policy", "observe")
        name = f"{transport}, {'paths at random' if flaps else path}"
        variants.append(Variant(name, (*arguments, *flags), like="stock"))
    reports = run_variants(world_size, variants, timeout_s=140, server=fork_server, directory=tmp_path)
    check_equal(reports)
    for (_transport, path, flaps), report in zip(PATHS, reports[1:], strict=True):
        assert len(report.losses) == ITERATIONS
        assert report.losses[-1] < report.losses[0]
        for rank in report.adaptra:
            assert rank["transports"] == ["HostTransport"]
            assert rank["training_iterations"] == ITERATIONS
        by_device, by_host, switches = _messages(report)
        if flaps:
            assert report.path_flaps >= 50
            assert switches >= 20
            assert min(by_device, by_host) >= 20
        elif path == "host":
            assert by_host > 2 * by_device, "the preferred path"
        else:
            assert by_device > 2 * by_host, "the device path takes over as soon as it is up"


def _messages(report: VariantReport) -> tuple[int, int, int]:
    """Sent by the device path and by the host path, and how often links changed between the two; of all ranks."""
    paths = [link["paths"] for rank in report.adaptra for link in rank["links"].values()]
    return tuple(sum(counters[what] for counters in paths) for what in ("sent_by_device", "sent_by_host", "switches"))
