# SPDX-License-Identifier: Apache-2.0
"""Promise P1: losses, parameters and optimizer state are bitwise those of stock Megatron, in any order of actions.

Every case trains stock and several orders in one set of processes, with evaluation in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.schedules import PLACED_AS_MEGATRON

from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Kind, Schedule
from adaptra_megatron.schedule.order_registry import make_schedule, names_for
from adaptra_megatron.schedule.planner import plan
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

ITERATIONS, EVALUATIONS = 6, 2
"""Enough for plans that come of measuring where the planner is prompt: the first can run in the fourth iteration."""
GIVEN_ITERATIONS = 2
"""A given order that is wrong shows in the first iteration, and what the optimizer makes of it in the second."""
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Case:
    """One layout and set of features."""

    name: str
    pipeline: int
    flags: str = ""
    chunks: int = 1
    tensor: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data

    def arguments(self, *, iterations: int) -> tuple[str, ...]:
        virtual = f"--num-virtual-stages-per-pipeline-rank {self.chunks}" if self.chunks > 1 else ""
        return tuple(
            f"--pipeline-model-parallel-size {self.pipeline} --tensor-model-parallel-size {self.tensor} {virtual} "
            f"--num-layers {self.pipeline * self.chunks} --mock-data --no-gradient-accumulation-fusion "
            f"--global-batch-size {MICRO_BATCHES * self.data} --train-iters {iterations} "
            f"--eval-iters 1 --eval-interval {iterations // EVALUATIONS} {self.flags}".split()
        )


LENGTHS = "--variable-seq-lengths --mock-data-padded"
"""Each micro-batch has one of its own, so that what goes forwards and backwards at a time is of two."""

MTP = "--position-embedding-type rope --mtp-num-layers"

CASES = (
    Case("pp2", 2),
    Case("pp2-vpp1-untied", 2, "--untie-embeddings-and-output-weights --num-virtual-stages-per-pipeline-rank 1"),
    Case("pp2-bf16", 2, "--bf16"),
    Case("pp2-recompute", 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Case("pp2-dropout", 2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    Case("pp2-variable-lengths", 2, "--variable-seq-lengths"),
    Case("pp2-vpp2-lengths-that-differ", 2, LENGTHS, chunks=2),
    Case("pp4-vpp2-lengths-that-differ-blocking", 4, f"{LENGTHS} --no-overlap-p2p-communication", chunks=2),
    Case("pp4", 4),
    Case("pp4-bf16-untied", 4, "--bf16 --untie-embeddings-and-output-weights"),
    Case("pp2-vpp2", 2, chunks=2),
    Case("pp2-vpp2-bf16", 2, "--bf16", chunks=2),
    Case("pp4-vpp2", 4, chunks=2),
    Case("pp4-vpp2-group8", 4, "--microbatch-group-size-per-virtual-pipeline-stage 8", chunks=2),
    Case("pp2-dp2", 2, data=2),
    Case("pp2-dp2-overlap", 2, "--overlap-grad-reduce", data=2),
    Case("pp2-dp2-distributed", 2, "--use-distributed-optimizer", data=2),
    Case(
        "pp2-dp2-distributed-overlap",
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
        data=2,
    ),
    Case(
        "pp2-vpp2-dp2-distributed-overlap",
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --align-param-gather",
        chunks=2,
        data=2,
    ),
    Case(
        "pp2-dp2-optimizer-instances",
        2,
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --overlap-grad-reduce "
        "--no-align-grad-reduce",
        data=2,
    ),
    Case("pp2-tp2-sequence-parallel", 2, "--sequence-parallel", tensor=2),
    Case("pp2-tp2-bf16", 2, "--bf16", tensor=2),
    Case("pp2-vpp2-tp2-multi-token-prediction", 2, f"{MTP} 1 --sequence-parallel", chunks=2, tensor=2),
)


def orders(case: Case) -> dict[str, Schedule]:
    """Orders to compare, by name: W inside B, right after, all at the end, with chunks those of the first before all
    others (it has the tied embedding, and is stock's last to be complete); planned; all that have names and Megatron's
    placement, unless they are among those."""
    stock = stock_order(case.pipeline, MICRO_BATCHES, case.chunks, _group_size(case))
    links = {link: LinkCost(2.0, 0.5) for link in ((0, 1), (1, 0))}
    costs = uniform_costs(
        case.pipeline,
        MICRO_BATCHES,
        chunks=case.chunks,
        forward_s=1.0,
        backward_input_s=1.2,
        backward_weight_s=0.7,
        links=links,
        max_in_flight=None,
    )
    found = {
        "stock-order": stock,
        "w-right-after-b": split_backward(stock, 0),
        "w-at-the-end": split_backward(stock, None),
        "planned-slow-link": plan(costs).schedule,
    }
    if case.chunks > 1:
        found["w-by-chunk"] = _by_chunk(found["w-at-the-end"])
    for name in sorted(PLACED_AS_MEGATRON.intersection(names_for(case.chunks))):
        schedule = make_schedule(name, case.pipeline, MICRO_BATCHES, case.chunks, _group_size(case))
        if schedule not in found.values() and not schedule.combines:  # test_combined has those that do
            found[name] = schedule
    return found


def _by_chunk(schedule: Schedule) -> Schedule:
    """Return the schedule with all W at the end, those of lower chunks first."""
    orders = tuple(
        tuple(sorted(order, key=lambda each: each.chunk + 1 if each.kind is Kind.BACKWARD_WEIGHT else 0))
        for order in schedule.orders
    )
    return replace(schedule, orders=orders)


def _group_size(case: Case) -> int | None:
    words = case.flags.split()
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    return int(words[words.index(flag) + 1]) if flag in words else None


def variants(case: Case, directory: Path) -> list[Variant]:
    arguments, longer = case.arguments(iterations=GIVEN_ITERATIONS), case.arguments(iterations=ITERATIONS)
    found = [Variant("stock", arguments)]
    for name, schedule in orders(case).items():
        path = directory / f"{name}.csv"
        path.write_text(schedule_to_csv(schedule))
        found.append(Variant(name, (*arguments, "--adaptra", "--adaptra-plan-csv", str(path)), like="stock"))
    found.append(Variant("stock-longer", longer))
    ours = (*longer, "--adaptra", "--emulate-prompt-planner")
    found.append(Variant("measured", ours, like="stock-longer"))
    found.append(Variant("observe", (*ours, "--adaptra-policy", "observe"), like="stock-longer"))
    return found


def check_ran(reports: list[VariantReport], case: Case) -> None:
    """The comparison means something: training moved, and weight gradients were really computed on their own."""
    whole = {"stock", "stock-longer", "observe"} | {
        name for name, order in orders(case).items() if not order.splits_backward
    }
    for report in reports:
        given = report.name not in ("stock-longer", "measured", "observe")
        iterations = GIVEN_ITERATIONS if given else ITERATIONS
        assert len(report.losses) == iterations
        assert len(report.evaluation_losses) == EVALUATIONS
        assert report.losses[-1] != report.losses[0] if given else report.losses[-1] < report.losses[0]
        splits = report.name not in whole
        ours = not report.name.startswith("stock") or report.name == "stock-order"
        assert [rank["training_iterations"] for rank in report.adaptra] == [iterations] * case.world_size * ours
        if report.name in ("measured", "observe"):
            assert report.adaptra[0]["measured_costs"] is not None
        for rank in report.adaptra:
            assert (rank["split_weight_gradients"] > 0) == splits, report.name


COVERED = {
    "pp2",
    "pp2-variable-lengths",
    "pp4-vpp2-lengths-that-differ-blocking",
    "pp2-bf16",
    "pp4",
    "pp2-vpp2",
    "pp2-vpp2-bf16",
    "pp4-vpp2",
    "pp2-dp2",
    "pp2-dp2-overlap",
    "pp2-dp2-distributed",
    "pp2-dp2-optimizer-instances",
    "pp2-tp2-bf16",
    "pp2-tp2-sequence-parallel",
}
"""Each is part of another case, or of the same layout's dispatched online: they tell where to look when that fails."""


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.name in COVERED else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_bitwise_equal_to_stock(case: Case, tmp_path: Path, fork_server: ForkServer) -> None:
    made = variants(case, tmp_path)
    reports = run_variants(case.world_size, made, timeout_s=340, server=fork_server, directory=tmp_path / "run")
    check_equal(reports)
    check_ran(reports, case)
