# SPDX-License-Identifier: Apache-2.0
"""Steps of the optimizer that are taken before the norm is known: stock's numbers to the bit, clipped or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptra_megatron.megatron.staggered_optimizer import CALM_ITERATIONS
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

FLAG = "--adaptra-staggered-optimizer"


@dataclass(frozen=True)
class Case:
    """One layout. Its norm gets above --clip-grad again after a while, and early steps come before that."""

    name: str
    iterations: int
    flags: str
    replicas: int = 1
    is_clipped: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(
            "--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --no-gradient-accumulation-fusion "
            "--hidden-size 64 --seq-length 64 --untie-embeddings-and-output-weights "
            f"--global-batch-size {4 * self.replicas} --train-iters {self.iterations} {self.flags}".split()
        )


CASES = (
    Case("plain-evaluated-after-a-step-that-is-taken-back", 20, "--clip-grad 1.0 --eval-iters 1 --eval-interval 16"),
    Case("bf16-dropout", 20, "--bf16 --clip-grad 0.95 --hidden-dropout 0.1 --attention-dropout 0.1"),
    Case("never-clipped", CALM_ITERATIONS + 3, "--clip-grad 0", is_clipped=False),
    Case("distributed", 34, "--use-distributed-optimizer --bf16 --clip-grad 0.75", 2),
    Case(
        "distributed-overlapped",
        34,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --clip-grad 0.75",
        2,
    ),
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.name == "distributed" else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_equal_to_the_barrier(case: Case, tmp_path: Path, fork_server: ForkServer) -> None:
    arguments = case.arguments
    variants = [Variant("stock", arguments), Variant("staggered", (*arguments, "--adaptra", FLAG), like="stock")]
    ranks = 2 * case.replicas
    reports = run_variants(ranks, variants, timeout_s=150, server=fork_server, directory=tmp_path)
    check_equal(reports)
    counts = {(rank["early_steps"], rank["steps_taken_back"]) for rank in reports[1].adaptra}
    ((early, taken_back),) = counts
    assert early > taken_back, "no step was taken before its norm was known and was right"
    assert (taken_back > 0) == case.is_clipped, "no step had to be taken back"
