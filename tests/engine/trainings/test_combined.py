# SPDX-License-Identifier: Apache-2.0
"""Combined 1F1B: bitwise stock's without a plan, and in others that combine some pairs and separate the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from adaptra_megatron.schedule.classic import interleaved_combined, interleaved_split, split_every_other
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule, units
from adaptra_megatron.schedule.schedule_checks import check_schedule
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

MICRO_BATCHES, ITERATIONS, EXPERT_RANKS = 8, 3, 2
COMBINED = "--overlap-moe-expert-parallel-comm"


@dataclass(frozen=True)
class Case:
    """One layout and set of features."""

    name: str
    pipeline: int
    chunks: int
    flags: str = ""

    @property
    def world_size(self) -> int:
        return self.pipeline * EXPERT_RANKS

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(
            f"--pipeline-model-parallel-size {self.pipeline} --num-virtual-stages-per-pipeline-rank {self.chunks} "
            f"--num-layers {self.pipeline * self.chunks} --num-experts 4 --expert-model-parallel-size {EXPERT_RANKS} "
            f"--bf16 {COMBINED} --mock-data --global-batch-size {MICRO_BATCHES * EXPERT_RANKS} "
            f"--train-iters {ITERATIONS} --eval-iters 1 --eval-interval 2 {self.flags}".split()
        )


PREDICTION = "--position-embedding-type rope --mtp-num-layers 1 --untie-embeddings-and-output-weights"
CASES = (
    Case("pp2-vpp2", 2, 2, "--no-gradient-accumulation-fusion"),
    Case(
        "pp2-vpp3-shared-recompute",
        2,
        3,
        "--moe-shared-expert-intermediate-size 32 --recompute-granularity selective "
        "--recompute-modules core_attn --emulate-fused-weight-gradient",
    ),
    Case("pp2-vpp2-prediction", 2, 2, f"{PREDICTION} --calculate-per-token-loss"),
    Case("pp2-vpp2-sharded", 2, 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    Case("pp2-vpp4-group", 2, 4, "--microbatch-group-size-per-virtual-pipeline-stage 4 --overlap-grad-reduce"),
    Case("pp4-vpp2-lengths", 4, 2, "--variable-seq-lengths --mock-data-padded"),
)


def stock_order(case: Case) -> Schedule:
    words = case.flags.split()
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    group = int(words[words.index(flag) + 1]) if flag in words else None
    return interleaved_combined(case.pipeline, MICRO_BATCHES, case.chunks, group)


def mixed(schedule: Schedule, seed: int) -> Schedule:
    """Return the order with each combined action left so, with a split backward, or separated; and with weight
    gradients at random places."""
    chooses = random.Random(seed)
    found = replace(schedule, orders=tuple(tuple(_mixed(order, chooses)) for order in schedule.orders))
    check_schedule(found)
    return found


def _mixed(order: Order, chooses: random.Random) -> Iterator[Action]:
    due: list[Action] = []
    for unit in units(order):
        *forward, last = unit
        combined = bool(forward) and chooses.random() < 0.6
        whole = last.kind is Kind.FORWARD or chooses.random() < 0.5
        # Gradients of a chunk are summed in micro-batch order: nothing may be due before a whole backward.
        must = [whole and each.chunk == last.chunk for each in due]
        count = max(len(due) - must[::-1].index(True) if any(must) else 0, chooses.randrange(3))
        yield from due[:count]
        del due[:count]
        yield from (action._replace(combined=combined) for action in forward)
        yield last if whole else last._replace(kind=Kind.BACKWARD_INPUT)
        due += [] if whole else [last._replace(kind=Kind.BACKWARD_WEIGHT)]
    yield from due


def variants(case: Case, directory: Path) -> list[Variant]:
    stock = stock_order(case)
    orders = {f"mixed-{seed}": mixed(stock, seed) for seed in range(2)}
    orders["separated"] = interleaved_split(case.pipeline, MICRO_BATCHES, case.chunks)
    found = [
        Variant("stock", case.arguments),
        Variant("own", (*case.arguments, "--adaptra"), like="stock"),
    ]
    if case == CASES[0]:
        found.append(Variant("observed", (*case.arguments, "--adaptra", "--adaptra-policy", "observe"), like="stock"))
    for name, schedule in orders.items():
        path = directory / f"{name}.csv"
        path.write_text(schedule_to_csv(schedule))
        found.append(Variant(name, (*case.arguments, "--adaptra", "--adaptra-plan-csv", str(path)), like="stock"))
    return found


def check_ran(reports: list[VariantReport], case: Case) -> None:
    stock = stock_order(case)
    for report in reports[1:]:
        ran = schedule_from_csv(report.adaptra[0]["schedule_csv"], chunks=case.chunks)
        assert ran.combines == (report.name != "separated")
        assert (ran == stock) == (report.name == "observed")
        assert (ran == split_every_other(stock)) == (report.name == "own"), "so few iterations are not planned for"
        splits = report.name != "observed"
        assert all((rank["split_weight_gradients"] > 0) == splits for rank in report.adaptra)
        assert [rank["training_iterations"] for rank in report.adaptra] == [ITERATIONS] * case.world_size


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.pipeline > 2 else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_bitwise_equal_to_stock(case: Case, tmp_path: Path, fork_server: ForkServer) -> None:
    made = variants(case, tmp_path)
    reports = run_variants(case.world_size, made, timeout_s=280, server=fork_server, directory=tmp_path / "run")
    check_equal(reports)
    check_ran(reports, case)


DELAYED = (
    "--delay-wgrad-compute --moe-shared-expert-intermediate-size 32 --emulate-fused-weight-gradient "
    "--disable-bias-linear"
)
STAND_INS = {
    "delayed": (DELAYED, "delayed_ranks.py"),
    "flex": ("--moe-token-dispatcher-type flex --no-gradient-accumulation-fusion", "flex_ranks.py"),
}
"""Flags, and ranks with a stand-in for what a CPU lacks: Transformer Engine's layers, which delay weight gradients
themselves, and DeepEP, by which tokens go to experts."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STAND_INS)
def test_bitwise_equal_to_stock_with_a_stand_in(name: str, tmp_path: Path) -> None:
    flags, ranks = STAND_INS[name]
    case = Case(name, 2, 2, flags)
    made = variants(case, tmp_path)
    program = (str(Path(__file__).with_name(ranks)),)
    reports = run_variants(case.world_size, made, timeout_s=380, directory=tmp_path / "run", program=program)
    check_equal(reports)
    check_ran(reports, case)
