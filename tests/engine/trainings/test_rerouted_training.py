# SPDX-License-Identifier: Apache-2.0
"""Training whose micro-batches flow around a slow cell: the numbers of training without, up to rounding.

Both train with the flag, so that random numbers are drawn alike; in one of them a cell turns slow. The planner gets
emulated times, and is waited for: a busy machine makes no cell slow, and no route late.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, run_variants

ITERATIONS, ONSET, MICRO_BATCHES, COMPUTE_MS = 14, 4, 6, 8
LOSSES_WITHIN, PARAMETERS_WITHIN = 1e-6, 1e-5


@dataclass(frozen=True)
class Case:
    """One layout and set of features, with the cell that is slow."""

    name: str
    replicas: int
    stages: int
    slow: str
    flags: str = ""
    tensor: int = 1
    expert: int = 1
    """Number of data-parallel ranks in each replica, which its experts span."""
    rounding: float = 1.0
    """How many times as far as in single precision sums may be."""
    times: int = 3
    """How many times as long the slow cell takes."""

    @property
    def lanes(self) -> int:
        return self.tensor * self.expert

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages * self.lanes

    def arguments(self) -> tuple[str, ...]:
        times = ",".join(3 * [f"{COMPUTE_MS}"])
        return tuple(
            f"--pipeline-model-parallel-size {self.stages} --tensor-model-parallel-size {self.tensor} "
            f"--expert-model-parallel-size {self.expert} "
            f"--num-layers {self.stages} --mock-data --no-gradient-accumulation-fusion --hidden-size 32 "
            f"--seq-length 16 --global-batch-size {MICRO_BATCHES * self.replicas * self.expert} "
            f"--train-iters {ITERATIONS} "
            f"--emulate-compute-ms {times} --emulate-exact-times --emulate-prompt-planner --adaptra "
            f"--adaptra-reroute stragglers --adaptra-host-transport shm --adaptra-max-in-flight 8 {self.flags}".split()
        )


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PER_TOKEN = "--calculate-per-token-loss --mock-data-padded"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOADS = "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj mlp_norm"

CASES = (
    Case("first-stage", 2, 2, "0.0", "--eval-iters 1 --eval-interval 10"),
    Case("relieved-of-all-its-work", 2, 2, "0.1", times=20),
    Case("last-stage-dropout", 2, 2, "1.1", DROPOUT),
    Case("middle-stage-untied", 2, 3, "1.1", "--untie-embeddings-and-output-weights --overlap-grad-reduce"),
    Case("bf16-distributed", 2, 2, "0.1", "--bf16 --use-distributed-optimizer --overlap-grad-reduce", rounding=2**12),
    Case("tp2", 2, 2, "1.0", tensor=2),
    Case("loss-per-token", 2, 2, "0.1", PER_TOKEN),
    Case("loss-per-token-tied-over-3-stages", 2, 3, "0.2", PER_TOKEN),
    Case(
        "experts-whose-losses-are-scaled-per-token",
        2,
        2,
        "0.1",
        f"{PER_TOKEN} --num-experts 4 --sequence-parallel",
        tensor=2,
    ),
    Case("experts-that-span-replicas", 2, 2, "0.1", "--num-experts 4", expert=2),
    Case("multi-token-prediction", 2, 2, "0.1", "--position-embedding-type rope --mtp-num-layers 1"),
    Case("full-recomputation", 2, 2, "1.1", f"{RECOMPUTE} {DROPOUT}"),
    Case("offloaded-activations", 2, 2, "1.0", OFFLOADS),
    Case("selective-recomputation", 2, 2, "0.0", f"--recompute-granularity selective {DROPOUT}"),
)


COVERED = {
    *("last-stage-dropout", "middle-stage-untied", "tp2"),
    *("loss-per-token-tied-over-3-stages", "selective-recomputation", "experts-whose-losses-are-scaled-per-token"),
    *("multi-token-prediction", "offloaded-activations"),
}
"""What these have of their own is not routing's: they tell where to look when another case fails."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.name in COVERED else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_routed_training_is_training(case: Case, tmp_path: Path, fork_server: ForkServer) -> None:
    slow = ("--emulate-slow-cell", f"{case.slow}:{case.times},from={ONSET}")
    variants = [
        Variant("healthy", case.arguments()),
        Variant("routed", (*case.arguments(), *slow), like="healthy", nearly=True),
    ]
    healthy, routed = run_variants(case.world_size, variants, timeout_s=180, server=fork_server, directory=tmp_path)
    assert not any(rank["routed_iterations"] for rank in healthy.adaptra)
    assert all(rank["routed_iterations"] > 4 for rank in routed.adaptra), "hardly anything ran routed"
    assert routed.distances["losses"] <= LOSSES_WITHIN * case.rounding
    # Adam and clipping hide a gradient that is too long as a whole, as one divided by too few tokens is.
    assert routed.distances["grad norms"] <= PARAMETERS_WITHIN * case.rounding
    assert routed.distances["parameters"] <= PARAMETERS_WITHIN * case.rounding
    for report in (healthy, routed):
        check_replicas(report, case)


def check_replicas(report: VariantReport, case: Case) -> None:
    """All replicas have the same parameters, to the bit. Ranks: lanes innermost, then replicas, then stages."""
    for stage in range(case.stages):
        for lane in range(case.lanes):
            first = stage * case.replicas * case.lanes + lane
            found = {report.fingerprints[first + replica * case.lanes] for replica in range(case.replicas)}
            assert len(found) == 1, f"{report.name}: replicas of stage {stage}, lane {lane} differ"
