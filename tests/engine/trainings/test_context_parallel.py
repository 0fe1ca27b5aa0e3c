# SPDX-License-Identifier: Apache-2.0
"""Promise P1 with context parallelism: bitwise stock's, although peers meet in collectives inside F and B.

Each rank of a stage has a pipeline of its own and part of every sequence; attention gathers keys and values from its
peers in F, and reduces their gradients in B. Orders that differ between them would mix micro-batches up, or hang.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

ITERATIONS, MICRO_BATCHES, RANKS = 8, 8, 4
TRAINING = (
    "--mock-data --no-gradient-accumulation-fusion --eval-iters 1 --eval-interval 4 --pipeline-model-parallel-size 2 "
    f"--train-iters {ITERATIONS}"
)
SPREAD = f"--context-parallel-size 2 --global-batch-size {MICRO_BATCHES}"
JITTER = "--emulate-slow-link 0-1:exponential_ms=8,path=both"
HOST_PATH = "--adaptra-host-transport shm --adaptra-path host"
CHUNKS = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --bf16"
LAYOUTS = {
    "distributed-optimizer": (1, "--num-layers 2 --use-distributed-optimizer --overlap-grad-reduce"),
    "interleaved-bf16": (2, CHUNKS),
    "variable-lengths": (1, "--num-layers 2 --variable-seq-lengths"),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout",
    [
        "distributed-optimizer",
        pytest.param("interleaved-bf16", marks=pytest.mark.slow),
        pytest.param("variable-lengths", marks=pytest.mark.slow),
    ],
)
def test_bitwise_equal_to_stock(layout: str, tmp_path: Path, fork_server: ForkServer) -> None:
    chunks, flags = LAYOUTS[layout]
    plan = tmp_path / "plan.csv"
    plan.write_text(schedule_to_csv(split_backward(stock_order(2, MICRO_BATCHES, chunks), None)))
    planned = f"--adaptra --adaptra-plan-csv {plan}"
    online = f"{planned} --adaptra-dispatch online {JITTER}"
    stock = f"{TRAINING} {SPREAD} {flags}"
    ways = {
        "W at the end": planned,
        "measured": "--adaptra",
        "online": online,
        "online, host path": f"{online} {HOST_PATH}",
        "paths at random": f"{planned} --adaptra-host-transport shm --emulate-path-flaps 7",
    }
    variants = [Variant("stock", tuple(stock.split()))]
    variants += [Variant(name, (*variants[0].argv, *way.split()), like="stock") for name, way in ways.items()]
    reports = run_variants(RANKS, variants, timeout_s=170, server=fork_server, directory=tmp_path / "run")
    check_equal(reports)
    for report in reports[1:]:
        check_ran(report)


def check_ran(report: VariantReport) -> None:
    """All of it was run by us, split; online, in one order that was not the plan's on all ranks of a stage."""
    assert report.losses[-1] < report.losses[0]
    assert [rank["training_iterations"] for rank in report.adaptra] == [ITERATIONS] * RANKS
    assert all(rank["split_weight_gradients"] > 0 for rank in report.adaptra)
    if report.name.startswith("online"):
        assert [rank["online_iterations"] for rank in report.adaptra] == [ITERATIONS] * RANKS
        moved = [rank["moved_actions"] for rank in report.adaptra]
        assert moved[0] == moved[1], "the ranks of the first stage"
        assert moved[2] == moved[3], "the ranks of the last stage"
        assert sum(moved) >= 10 * RANKS


def test_spread_sequences_train_as_whole_ones_do(tmp_path: Path, fork_server: ForkServer) -> None:
    """Stock, on which the comparisons stand, computes attention over the whole sequence, with all its gradients."""
    size = "--num-layers 2 --hidden-size 64 --seq-length 64"  # large enough to learn something in four iterations
    argv = tuple(f"{TRAINING} {size} --train-iters 4 --global-batch-size {2 * MICRO_BATCHES}".split())
    variants = [Variant("whole", argv), Variant("spread", (*argv, "--context-parallel-size", "2"))]
    whole, spread = run_variants(RANKS, variants, timeout_s=50, server=fork_server, directory=tmp_path)
    assert whole.losses[0] - whole.losses[-1] > 0.1
    assert spread.losses == pytest.approx(whole.losses, rel=1e-5)
    assert spread.losses != whole.losses, "one and the same: nothing was spread"
