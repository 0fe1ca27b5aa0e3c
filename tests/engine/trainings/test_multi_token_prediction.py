# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction makes the last stage heavier: plans know by how much, since each chunk's actions are timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adaptra_megatron.schedule.costs import costs_from_json
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

STAGES, MICRO_BATCHES, ITERATIONS = 3, 8, 14
JOB = (
    f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} --mock-data "
    f"--no-gradient-accumulation-fusion --train-iters {ITERATIONS} "
    "--position-embedding-type rope --mtp-num-layers 2 --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 8192"
)
TABLES = ("forward_s", "backward_input_s", "backward_weight_s")
OURS = "--adaptra --adaptra-host-transport shm --emulate-prompt-planner --emulate-exact-times"
SLOW = "--emulate-slow-link 1-2:latency_ms=150,path=both,from=6"


@pytest.mark.timeout(300)
def test_plans_know_the_heavier_stage_and_a_slow_link_in_front_of_it(tmp_path: Path, fork_server: ForkServer) -> None:
    """Computed, not emulated, and measured in CPU time, as other programs may run: the last stage has one layer as the
    others have, two more of prediction, and three output layers. With a slow link in front of it stages order
    themselves by arrivals."""
    stock, planned, online = run_variants(
        STAGES,
        [
            Variant("stock", tuple(JOB.split())),
            Variant("planned", tuple(f"{JOB} {OURS}".split()), like="stock"),
            Variant(
                "online",
                tuple(f"{JOB} {OURS} {SLOW} --adaptra-dispatch online".split()),
                like="stock",
            ),
        ],
        timeout_s=280,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal([stock, planned, online])
    # Whole backwards may take less than their halves: here they count as these.
    # Without links, which a busy machine makes slow: it is about what stages compute.
    costs = replace(costs_from_json(planned.adaptra[0]["measured_costs"]), backward_s=None, links={})
    compute_s = [sum(getattr(costs, name)[stage][0] for name in TABLES) for stage in range(STAGES)]
    assert compute_s[-1] > 1.5 * max(compute_s[:-1]), compute_s
    order = plan(costs).schedule
    alike = replace(costs, **{name: (getattr(costs, name)[0],) * STAGES for name in TABLES})
    assert simulate(order, costs).makespan_s > 1.2 * simulate(order, alike).makespan_s, "it sets the pace"
    assert online.links_struck["1>2"] >= MICRO_BATCHES
    assert all(rank["split_weight_gradients"] > 0 for rank in (*planned.adaptra, *online.adaptra))
