# SPDX-License-Identifier: Apache-2.0
"""Replicas that run plans of their own reduce gradients together: to the bit as stock, and without waiting for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.faults.network.link_faults import LinkFault
from testing.faults.network.link_story import LinkFaultScenario
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ITERATIONS = 10


@pytest.mark.timeout(150)
def test_replicas_on_plans_of_their_own_reduce_as_stock(fork_server: ForkServer, tmp_path: Path) -> None:
    """Two chunks per stage, whose reductions overlap with what is left of the backward; only one replica has slow
    links, so that it runs ahead with forwards and the other does not."""
    slow = [LinkFault(source=a, target=b, latency_s=0.05, pipeline=1) for a, b in ((0, 1), (1, 0))]
    story = tmp_path / "story.json"
    LinkFaultScenario(iterations=ITERATIONS, spells=tuple(slow)).write(story)
    training = (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--global-batch-size 16 --mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 "
        f"--train-iters {ITERATIONS} --overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"
    ).split()
    ours = [
        "--adaptra",
        "--emulate-prompt-planner",
        "--emulate-compute-ms",
        "5,5,5",
        "--emulate-link-story",
        str(story),
    ]
    stock, apart = run_variants(
        4,
        [Variant("stock", tuple(training)), Variant("apart", (*training, *ours), like="stock")],
        timeout_s=140,
        server=fork_server,
        directory=tmp_path / "run",
    )
    check_equal([stock, apart])
    of_replicas = [(rank, rank + 2) for rank in (0, 1)]
    for first, last in of_replicas:
        assert apart.plans[first] == apart.plans[last], "stages of one replica run one plan"
    assert apart.plans[0][-1] != apart.plans[1][-1], "the fault did not lead to different plans"
    assert {rank[-1][0] for rank in apart.plans} != {0}
