# SPDX-License-Identifier: Apache-2.0
"""Promise P1 under online dispatch: whatever arrives when, losses, parameters and optimizer state are bitwise stock's.

Links delay each message at random, so the order in which actions run is another one in every iteration, and differs
between data-parallel replicas. Each test proves that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

ITERATIONS = 8
MICRO_BATCHES = 8
MODEL = "--mock-data --no-gradient-accumulation-fusion --eval-iters 1 --eval-interval 4"


@dataclass(frozen=True)
class Layout:
    """Stages, chunks and what they are trained with."""

    stages: int
    flags: str = ""
    chunks: int = 1
    tensor: int = 1
    data: int = 1

    def arguments(self) -> tuple[str, ...]:
        virtual = f"--num-virtual-stages-per-pipeline-rank {self.chunks}" if self.chunks > 1 else ""
        return tuple(
            f"{MODEL} {virtual} --pipeline-model-parallel-size {self.stages} --num-layers {self.stages * self.chunks} "
            f"--tensor-model-parallel-size {self.tensor} --global-batch-size {MICRO_BATCHES * self.data} "
            f"--train-iters {ITERATIONS} {self.flags}".split()
        )


LAYOUTS = {
    "pp2": Layout(2),
    "pp4-vpp2": Layout(4, chunks=2),
    "pp2-vpp2-dp2": Layout(2, "--overlap-grad-reduce --bf16", chunks=2, data=2),
    "pp2-tp2": Layout(2, "--sequence-parallel", tensor=2),
}
WAYS = {
    "torch.distributed": "",
    "host path": "--adaptra-host-transport shm --adaptra-path host",
    "paths at random": "--adaptra-host-transport shm --emulate-path-flaps 7",
}
AUTO = "--adaptra --adaptra-max-in-flight 16 --adaptra-host-transport shm --adaptra-path host"
JITTER = "0-1:exponential_ms=8,path=both"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "pp2" else ()) for name in LAYOUTS]
)
def test_bitwise_equal_to_stock_in_whatever_order(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    layout = LAYOUTS[name]
    # A plan that keeps all weight gradients for the end, and so holds everything, leaves the most to be decided.
    plan = tmp_path / "plan.csv"
    plan.write_text(schedule_to_csv(split_backward(stock_order(layout.stages, MICRO_BATCHES, layout.chunks), None)))
    online = f"--adaptra --adaptra-dispatch online --adaptra-plan-csv {plan} --emulate-slow-link {JITTER}"
    variants = [Variant("stock", layout.arguments())]
    for way, flags in WAYS.items():
        variants.append(Variant(way, (*layout.arguments(), *online.split(), *flags.split()), like="stock"))
    jitter = ("--emulate-slow-link", JITTER)
    variants.append(Variant("auto", (*layout.arguments(), *AUTO.split(), *jitter), like="stock"))
    world_size = layout.stages * layout.tensor * layout.data
    reports = run_variants(world_size, variants, timeout_s=110, server=fork_server, directory=tmp_path / "run")
    check_equal(reports)
    for report in reports[1:-1]:
        check_order_differed(report)
    online_iterations = sum(rank["online_iterations"] for rank in reports[-1].adaptra)
    assert 0 < online_iterations < ITERATIONS * world_size, "those that saw messages come at random, then"


def check_order_differed(report: VariantReport) -> None:
    """Every rank dispatched online, and left the plan often."""
    assert [rank["online_iterations"] for rank in report.adaptra] == [ITERATIONS] * len(report.adaptra)
    assert sum(rank["moved_actions"] for rank in report.adaptra) >= 10 * len(report.adaptra), report.name
