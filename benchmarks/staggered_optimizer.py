# SPDX-License-Identifier: Apache-2.0
"""What --adaptra-staggered-optimizer brings, in real processes with emulated compute.

    python benchmarks/staggered_optimizer.py [--rounds 3] [--action-ms 40]

Each case trains in pairs in one set of processes, with the barrier of the gradient norm and without, in one order and
the other, and the second must have the first one's numbers to the bit. Medians of the time from an iteration's
beginning to the next one's. Writes benchmarks/results/staggered_optimizer.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from adaptra_megatron.megatron.staggered_optimizer import CALM_ITERATIONS
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.order_registry import make_schedule
from adaptra_megatron.schedule.periods import period_s, plan_for_period
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.tools.local_ranks.launch_ranks import BRIEF_LOOKUPS
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ROOT = Path(__file__).resolve().parents[1]
FIRST, COUNTED = CALM_ITERATIONS + 2, 10
LIMIT_S = 300.0
FLAG = "--adaptra-staggered-optimizer"


@dataclass(frozen=True)
class Case:
    """A pipeline and its micro-batches, in an order with a name or in planned ones."""

    order: str | None
    """None: planned from what is measured, with room for twice the stages' activations."""
    stages: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.order or 'planned'}, {self.stages} stages, {self.micro_batches} micro-batches"

    def expected(self) -> tuple[float, float]:
        """Simulated times of an iteration with and without the barrier, in actions, where messages take no time."""
        costs = uniform_costs(
            self.stages,
            self.micro_batches,
            forward_s=1.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            max_in_flight=2.0 * self.stages,
        )
        if self.order is None:
            return plan(costs).makespan_s, plan_for_period(costs).makespan_s
        schedule = make_schedule(self.order, self.stages, self.micro_batches)
        return simulate(schedule, costs).makespan_s, period_s(schedule, costs)

    def arguments(self, action_ms: int, directory: Path) -> tuple[str, ...]:
        given = f"--adaptra-max-in-flight {2 * self.stages} --adaptra-dispatch planned"
        if self.order is not None:
            csv = directory / "plan.csv"
            csv.write_text(schedule_to_csv(make_schedule(self.order, self.stages, self.micro_batches)))
            given = f"--adaptra-plan-csv {csv}"
        return tuple(
            f"--pipeline-model-parallel-size {self.stages} --num-layers {self.stages} --hidden-size 32 --seq-length 16 "
            "--mock-data --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights --clip-grad 100 "
            f"--global-batch-size {self.micro_batches} --train-iters {FIRST + COUNTED} --adaptra --adaptra-path host "
            f"--adaptra-host-transport shm {given} "
            f"--emulate-compute-ms {action_ms},{action_ms},{action_ms}".split()
        )


CASES = (Case(None, 4, 8), Case("zb-h2", 4, 8), Case("zb-h2", 2, 8), Case("1f1b", 4, 8))


def pair_s(case: Case, action_ms: int, server: ForkServer, *, swapped: bool) -> tuple[float, float]:
    """Median seconds of an iteration with the barrier, and without."""
    with tempfile.TemporaryDirectory() as directory:
        barrier = case.arguments(action_ms, Path(directory))
        both = [("barrier", barrier), ("staggered", (*barrier, FLAG))]
        (first, argv), (second, like_argv) = reversed(both) if swapped else both
        variants = [Variant(first, argv), Variant(second, like_argv, like=first)]
        reports = run_variants(case.stages, variants, timeout_s=LIMIT_S, server=server, directory=directory)
    check_equal(reports)
    found = {report.name: median(report.periods_s[FIRST:]) for report in reports}
    early = next(report for report in reports if report.name == "staggered").adaptra[0]["early_steps"]
    assert early >= COUNTED, f"only {early} steps were taken early"
    return found["barrier"], found["staggered"]


def row(case: Case, rounds: int, action_ms: int, server: ForkServer) -> str:
    pairs = [pair_s(case, action_ms, server, swapped=bool(number % 2)) for number in range(rounds)]
    barrier, staggered = (median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    alone, period = case.expected()
    said = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"| {case} | {barrier:.3f} | {staggered:.3f} | {median(ratios):.3f} | {said} | {alone / period:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--action-ms", type=int, default=40, help="of each F, I and W")
    arguments = parser.parse_args()
    os.environ |= BRIEF_LOOKUPS
    with ForkServer() as server:
        rows = [row(case, arguments.rounds, arguments.action_ms, server) for case in CASES]
    lines = [
        "# What optimizer steps without a barrier bring",
        "",
        "Written by `python benchmarks/staggered_optimizer.py`.",
        "",
        f"One replica, F = I = W = {arguments.action_ms} ms of emulated compute, one process per stage on "
        f"{os.cpu_count()} cores; {arguments.rounds} pairs,",
        f"medians of {COUNTED - 1} iterations. Losses, norms, parameters and optimizer state of each pair are equal to "
        "the bit. Simulated: where messages take no time.",
        "",
        "| order | barrier, s | staggered, s | gain (median) | gains | simulated |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    page = ROOT / "benchmarks" / "results" / "staggered_optimizer.md"
    page.write_text("\n".join(lines) + "\n")
    print(page.read_text())


if __name__ == "__main__":
    main()
