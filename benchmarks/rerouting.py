# SPDX-License-Identifier: Apache-2.0
"""What routing micro-batches around a slow cell brings, in real processes with emulated compute; and swapping them.

    python benchmarks/rerouting.py [--layouts D4xP2xM16,...] [--varied D4xP2xM8,...] [--output FILE]

Each of the layouts trains four times in one set of processes: healthy and with a cell at 0.42 of its speed, each with
and without --adaptra-reroute stragglers. Medians over iterations; bounds are of the emulated times. Each of the varied
ones trains twice on sequences of 1 to 64 tokens, without and with the flag; actions last by their tokens, those on 64
three times as long.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, Override
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import routed_bound
from testing.jobs.variants import Variant, run_variants

ITERATIONS, ONSET = 18, 7
SPEED = 0.42
ACTION_MS = 20
RECOVERED = 1.05
"""An iteration that takes no more times as long as the routed median is one at the recovered speed."""


@dataclass(frozen=True)
class Layout:
    """Replicas, stages, micro-batches of each replica, tensor-parallel lanes."""

    replicas: int
    stages: int
    micro_batches: int
    lanes: int = 1

    def __str__(self) -> str:
        lanes = f"xT{self.lanes}" if self.lanes > 1 else ""
        return f"D{self.replicas}xP{self.stages}xM{self.micro_batches}{lanes}"

    def arguments(self) -> list[str]:
        times = f"{ACTION_MS},{ACTION_MS},{ACTION_MS}"
        return (
            f"--pipeline-model-parallel-size {self.stages} --tensor-model-parallel-size {self.lanes} "
            f"--num-layers {self.stages} --hidden-size 32 --seq-length 16 --mock-data "
            f"--no-gradient-accumulation-fusion --global-batch-size {self.micro_batches * self.replicas} "
            f"--train-iters {ITERATIONS} --emulate-compute-ms {times} --adaptra --adaptra-host-transport shm "
            f"--adaptra-max-in-flight {2 * self.stages + 2}"
        ).split()

    def bound_s(self, factor: float) -> float:
        """Lower bound of an iteration whose first cell takes `factor` times as long."""
        even = uniform_costs(
            self.stages,
            self.micro_batches,
            forward_s=ACTION_MS / 1e3,
            backward_input_s=ACTION_MS / 1e3,
            backward_weight_s=ACTION_MS / 1e3,
        )
        slow = Override(replicas=(0,), slow_stages={0: factor})
        return routed_bound(RoutedCosts(job=JobCosts(even, replicas=self.replicas, overrides=[slow]))).seconds


def layout_of(text: str) -> Layout:
    """The layout that text such as D4xP2xM16 or D2xP2xM12xT2 stands for."""
    found = re.fullmatch(r"D(\d+)xP(\d+)xM(\d+)(?:xT(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not as D4xP2xM16 or D2xP2xM12xT2")
    return Layout(*(int(number or 1) for number in found.groups()))


def row(layout: Layout) -> list[str]:
    """Train, and say what came of it."""
    slow = ["--emulate-slow-cell", f"0.0:{1 / SPEED:.4f},from={ONSET}"]
    routes = ["--adaptra-reroute", "stragglers"]
    base = layout.arguments()
    variants = [
        Variant("healthy", tuple(base)),
        Variant("healthy, with the flag", (*base, *routes)),
        Variant("slow", (*base, *slow)),
        Variant("routed", (*base, *routes, *slow)),
    ]
    ranks = layout.replicas * layout.stages * layout.lanes
    with tempfile.TemporaryDirectory() as directory:
        reports = run_variants(ranks, variants, timeout_s=600, directory=directory)
    seconds = {report.name: report.pipeline_seconds for report in reports}
    late = {name: median(each[-8:]) for name, each in seconds.items()}
    routed_s, bound_s = late["routed"], layout.bound_s(1 / SPEED)
    recovered = next(
        number
        for number in range(ONSET, ITERATIONS)
        if all(each <= RECOVERED * routed_s for each in sorted(seconds["routed"][number:])[:-1])
    )
    return [
        str(layout),
        f"{late['healthy']:.3f}",
        f"{late['healthy, with the flag'] / late['healthy']:.3f}",
        f"{late['slow']:.3f}",
        f"{routed_s:.3f}",
        f"{late['slow'] / routed_s:.2f} x",
        f"{bound_s:.3f}",
        f"{routed_s / bound_s:.3f}",
        str(recovered - ONSET),
    ]


def varied_row(layout: Layout) -> list[str]:
    """Train on sequences of varied lengths, and say what came of it."""
    varied = "--seq-length 64 --mock-data-padded --variable-seq-lengths --emulate-compute-ms"
    base = [*layout.arguments(), *varied.split(), ",".join([str(3 * ACTION_MS)] * 3)]
    variants = [Variant("apart", tuple(base)), Variant("swapped", (*base, "--adaptra-reroute", "stragglers"))]
    with tempfile.TemporaryDirectory() as directory:
        ranks = layout.replicas * layout.stages * layout.lanes
        reports = run_variants(ranks, variants, timeout_s=600, directory=directory)
    # Of all iterations but the first: each has lengths of its own, the same ones in both trainings.
    apart_s, swapped_s = (fmean(report.pipeline_seconds[1:]) for report in reports)
    taken = sum(rank["swapped_micro_batches"] for rank in reports[1].adaptra) / (layout.stages * layout.lanes)
    share = taken / (ITERATIONS * layout.replicas * layout.micro_batches)
    return [str(layout), f"{apart_s:.3f}", f"{swapped_s:.3f}", f"{apart_s / swapped_s:.2f} x", f"{share:.0%}"]


def table(head: Sequence[str], rows: Iterable[list[str]]) -> list[str]:
    """A table, shown line by line as it comes."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cells in rows:
        lines.append(f"| {' | '.join(cells)} |")
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    return lines


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    default = "D4xP2xM16,D3xP3xM12,D2xP4xM12,D2xP2xM12xT2"
    parser.add_argument("--layouts", default=default)
    parser.add_argument("--varied", default="D4xP2xM8,D3xP2xM8")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    head = [
        *("layout", "healthy, s", "with the flag", "one cell slow, s", "routed, s", "gain", "bound, s"),
        *("routed / bound", "slow iterations before"),
    ]
    lines = table(head, (row(layout_of(text)) for text in args.layouts.split(",") if text))
    head = ["layout", "not swapped, s", "swapped, s", "gain", "taken from other replicas"]
    lines += ["", *table(head, (varied_row(layout_of(text)) for text in args.varied.split(",") if text))]
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
