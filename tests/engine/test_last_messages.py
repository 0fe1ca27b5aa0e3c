# SPDX-License-Identifier: Apache-2.0
"""An iteration does not last until its last message has been acknowledged; none is lost for that."""

from __future__ import annotations

from pathlib import Path

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

LATENCY_S = 1.0
JOB = (
    "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 2 --train-iters 4 --mock-data "
    "--no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --emulate-compute-ms 5,5,5"
)
HOST_PATH = "--adaptra --adaptra-host-transport shm --adaptra-path host --emulate-slow-link"


def test_an_iteration_does_not_wait_for_the_acknowledgement_of_its_last_message(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    slow = f"0-1:latency_ms={1e3 * LATENCY_S:g},path=both"
    reports = run_variants(
        2,
        [Variant("stock", tuple(JOB.split())), Variant("ours", (*JOB.split(), *HOST_PATH.split(), slow), like="stock")],
        timeout_s=120,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal(reports)
    ours = reports[1]
    # Acknowledgements are no messages: activations and gradients of 2 micro-batches, and maybe notes.
    assert sum(ours.links_struck.values()) >= 4 * 2 * 2
    # An activation there and a gradient back; the acknowledgement of that would be a third way.
    assert min(ours.pipeline_seconds) < 2.8 * LATENCY_S, ours.pipeline_seconds
    assert min(ours.pipeline_seconds) > 2.0 * LATENCY_S, "the fault did not fire"
