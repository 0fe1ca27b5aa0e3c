# SPDX-License-Identifier: Apache-2.0
"""Combined 1F1B in the closed loop: a link turns slow, a plan for what was measured chooses where to combine."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.schedule.classic import interleaved_combined
from adaptra_megatron.schedule.costs import Costs, costs_from_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.simulator import simulate
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

STAGES, CHUNKS, MICRO_BATCHES, ITERATIONS = 2, 2, 8, 14
STOCK = interleaved_combined(STAGES, MICRO_BATCHES, CHUNKS)
JOB = (
    f"--pipeline-model-parallel-size {STAGES} --num-virtual-stages-per-pipeline-rank {CHUNKS} --num-layers 4 "
    "--num-experts 4 --expert-model-parallel-size 2 --bf16 --overlap-moe-expert-parallel-comm --mock-data "
    "--no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --global-batch-size 16 "
    f"--train-iters {ITERATIONS}"
)
OURS = "--adaptra --emulate-prompt-planner --emulate-exact-times --emulate-compute-ms"
SAVES, LOSES = "30,30,22,0.8", "30,30,22,1.2"
"""The last number: what a combined action takes, as a part of its halves."""
SLOW = "--emulate-slow-link 0-1:latency_ms=30,path=both,from=6"
"""With this latency, combining pays for about half of the pairs. With 80 ms, plans that combine none are as good."""


def ran(report: VariantReport) -> Schedule:
    """Return the schedule of the last iteration."""
    return schedule_from_csv(report.adaptra[0]["schedule_csv"], chunks=CHUNKS)


def measured(report: VariantReport) -> Costs:
    return costs_from_json(report.adaptra[0]["measured_costs"])


def savings(costs: Costs) -> list[float]:
    return [saving for rows in costs.combined_saving for row in rows for saving in row]


@pytest.mark.timeout(400)
def test_plans_combine_what_gains_by_it_and_separate_the_rest(tmp_path: Path, fork_server: ForkServer) -> None:
    stock, healthy, slow, loses = reports = run_variants(
        2 * STAGES,
        [
            Variant("stock", tuple(JOB.split())),
            Variant("healthy", tuple(f"{JOB} {OURS} {SAVES}".split()), like="stock"),
            Variant("slow", tuple(f"{JOB} {OURS} {SAVES} {SLOW}".split()), like="stock"),
            Variant("loses", tuple(f"{JOB} {OURS} {LOSES}".split()), like="stock"),
        ],
        timeout_s=380,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal(reports)
    assert not stock.adaptra
    assert "is on, policy adapt, combined 1F1B; to train" in (tmp_path / "rank0.log").read_text()
    assert slow.links_struck["0>1"] >= MICRO_BATCHES
    for report, saving in ((healthy, 0.2), (slow, 0.2), (loses, -0.2)):
        assert savings(measured(report)) == pytest.approx([saving] * len(savings(measured(report))), abs=0.02)
    # Never slower than stock's order.
    for report in (healthy, slow, loses):
        costs = measured(report)
        assert simulate(ran(report), costs).makespan_s <= 1.001 * simulate(STOCK, costs).makespan_s, report.name
    assert ran(healthy).combines
    assert ran(slow).combines
    assert ran(slow) != ran(healthy)
    assert simulate(ran(slow), measured(slow)).makespan_s < 0.85 * simulate(STOCK, measured(slow)).makespan_s
    pairs = sum(action.combined for order in ran(slow).orders for action in order)
    assert pairs < sum(action.combined for order in STOCK.orders for action in order), "some are separated"
    assert not ran(loses).combines, "none gains by it"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stock_and_plans_go_on_alike_from_a_checkpoint_of_a_plan(tmp_path: Path, fork_server: ForkServer) -> None:
    half, rest = f"{JOB} --train-iters 9", f"{JOB} --load {tmp_path / 'saved'}"
    ours = f"{OURS} {SAVES} {SLOW}".replace("from=6", "from=3")
    reports = run_variants(
        2 * STAGES,
        [
            Variant("stock", tuple(half.split())),
            Variant("saves", tuple(f"{half} {ours} --save {tmp_path / 'saved'}".split()), like="stock"),
            Variant("stock goes on", tuple(rest.split())),
            Variant("goes on", tuple(f"{rest} {ours}".split()), like="stock goes on"),
        ],
        timeout_s=280,
        server=fork_server,
        directory=tmp_path / "run",
    )
    check_equal(reports)
    for report in reports[1::2]:
        assert ran(report).combines
        assert ran(report) != STOCK, "another plan"
