# SPDX-License-Identifier: Apache-2.0
"""A link turns slow in the middle of a run, and heals: the plan follows, the numbers do not move."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.emulation.fork_server import ForkServer
from adaptra_megatron.emulation.variants import Variant, check_equal, run_variants
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.schedule.split import split_backward

STAGES, MICRO_BATCHES, CAP, COMPUTE_MS, LATENCY_MS, ONSET = 3, 9, 5, 8, 40, 6
STRUCK = f"--emulate-slow-link 1-2:latency_ms={LATENCY_MS},from={ONSET}"


@pytest.mark.timeout(120)
def test_plan_follows_a_link_that_turns_slow(tmp_path: Path, fork_server: ForkServer) -> None:
    compute = ",".join([str(COMPUTE_MS)] * 3)
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters 12 "
        f"--emulate-compute-ms {compute} {STRUCK}"
    ).split()
    adaptra = ("--adaptra", "--adaptra-max-in-flight", str(CAP))
    stock, ours = run_variants(
        STAGES,
        [Variant("stock", tuple(arguments)), Variant("adaptra", (*arguments, *adaptra), like="stock")],
        timeout_s=100,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal([stock, ours])
    # Half of the iterations, both ways: what stock sent late, ours sent late too.
    expected = (12 - ONSET) * MICRO_BATCHES
    assert stock.links_struck == ours.links_struck == {"1>2": expected, "2>1": expected}
    assert {rank["schedule_csv"] for rank in ours.adaptra} == {ours.adaptra[0]["schedule_csv"]}
    assert all(rank["plans_installed"] >= 2 for rank in ours.adaptra), "one plan for healthy links, one for the slow"
    _check_plan_absorbs(ours.adaptra[0]["schedule_csv"], [rank["peak_in_flight"] for rank in ours.adaptra])


def _check_plan_absorbs(csv: str, peaks: list[float]) -> None:
    """The last plan is valid, was held to, and hides the latency better than stock's order can."""
    plan = schedule_from_csv(csv, chunks=1)
    check_schedule(plan, max_in_flight=(CAP,) * STAGES)
    assert max(peaks) <= CAP
    assert all(seen >= planned for seen, planned in zip(peaks, peak_in_flight(plan, 0.0), strict=True))
    latency = LinkCost(LATENCY_MS / 1e3)
    costs = uniform_costs(
        STAGES,
        MICRO_BATCHES,
        forward_s=COMPUTE_MS / 1e3,
        backward_input_s=COMPUTE_MS / 1e3,
        backward_weight_s=COMPUTE_MS / 1e3,
        links={(1, 2): latency, (2, 1): latency},
        max_in_flight=CAP,
    )
    stock = split_backward(one_f_one_b(STAGES, MICRO_BATCHES), 0)
    assert simulate(plan, costs).makespan_s < 0.85 * simulate(stock, costs).makespan_s
