# SPDX-License-Identifier: Apache-2.0
"""Iteration times of real processes on an emulated cluster: stock Megatron, ZB-H1's order and adaptra, on a slow link.

    python benchmarks/pipeline.py [--quick] [--stretch 2] [--output benchmarks/results/pipeline.md]

Every row is one job in which stock, ZB-H1 and adaptra train the same model one after the other on the same processes:
compute is emulated (each F, B, W lasts a given time), one middle link is slow both ways. Losses are compared bitwise.
Times are medians over the iterations after adaptra has found its plan. An iteration is a whole training step; the
pipeline is its forward_backward function alone, which is what the lower bound (proven for adaptra's cap and the times
emulated) and the simulator (given the times that adaptra measured) speak of: the optimizer is not in them.
`--stretch N`: compute and delays last N times as long as the table says, and what is measured is divided by N, for
machines whose cores are too slow for so many ranks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import interleaved_split, stock_order, zb_h1
from adaptra_megatron.schedule.costs import Costs, LinkCost, costs_from_json, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

TIMED_ITERATIONS = 4
STOCK_ITERATIONS = 1 + TIMED_ITERATIONS
ADAPTRA_ITERATIONS = 4 + TIMED_ITERATIONS
"""The first iteration is not measured, the second is, and its plan takes effect in the fourth."""


@dataclass(frozen=True)
class Case:
    """One emulated cluster."""

    stages: int
    chunks: int
    micro_batches: int
    compute_ms: tuple[float, float, float]
    """F, B, W of one chunk."""
    latency_ms: float
    cap: float
    stretch: float = 1.0
    """How many times as long compute and delays are emulated."""

    @property
    def slow_link(self) -> tuple[int, int]:
        middle = self.stages // 2
        return middle - 1, middle

    def costs(self) -> Costs:
        forward, backward, weight = (value / 1e3 for value in self.compute_ms)
        source, target = self.slow_link
        cost = LinkCost(self.latency_ms / 1e3)
        return uniform_costs(
            self.stages,
            self.micro_batches,
            chunks=self.chunks,
            forward_s=forward,
            backward_input_s=backward,
            backward_weight_s=weight,
            links={(source, target): cost, (target, source): cost},
            max_in_flight=self.cap,
        )

    def arguments(self, iterations: int) -> tuple[str, ...]:
        source, target = self.slow_link
        words = [
            f"--pipeline-model-parallel-size {self.stages} --num-layers {self.stages * self.chunks}",
            f"--global-batch-size {self.micro_batches} --train-iters {iterations}",
            "--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16",
            f"--emulate-compute-ms {','.join(f'{self.stretch * value:g}' for value in self.compute_ms)}",
        ]
        if self.chunks > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.chunks}")
        if self.latency_ms:
            words.append(
                f"--emulate-slow-link {source}-{target}:latency_ms={self.stretch * self.latency_ms:g},path=both"
            )
        return tuple(" ".join(words).split())


@dataclass(frozen=True)
class Times:
    """Medians per iteration."""

    iteration_s: float
    pipeline_s: float


@dataclass(frozen=True)
class Row:
    """What one case measured, divided by its stretch."""

    case: Case
    stock: Times
    zero_bubble: Times
    adaptra: Times
    bound_s: float
    simulated_stock_s: float | None
    """None with chunks: the simulator knows Megatron's blocking sends, and interleaved stock overlaps them here."""
    simulated_zero_bubble_s: float
    simulated_adaptra_s: float
    peak_in_flight: float
    simulated_peak: float


def cases(quick: bool, stretch: float) -> Iterable[Case]:
    latencies = (0.0, 60.0) if quick else (0.0, 20.0, 40.0, 60.0)
    for compute_ms in ((20.0, 20.0, 20.0), (16.0, 18.0, 10.0)):
        for latency_ms in latencies:
            yield Case(8, 1, 24, compute_ms, latency_ms, cap=12, stretch=stretch)
    for latency_ms in latencies:
        yield Case(4, 2, 16, (20.0, 20.0, 20.0), latency_ms, cap=12, stretch=stretch)


def measure(case: Case, server: ForkServer) -> Row:
    """Run one case. Raises AssertionError if any loss or parameter differs from stock's."""
    if case.chunks == 1:
        zero_bubble = zb_h1(case.stages, case.micro_batches)
    else:
        zero_bubble = interleaved_split(case.stages, case.micro_batches, case.chunks)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        csv = directory / "zero-bubble.csv"
        csv.write_text(schedule_to_csv(zero_bubble))
        stock = case.arguments(STOCK_ITERATIONS)
        longer = case.arguments(ADAPTRA_ITERATIONS)
        reports = run_variants(
            case.stages,
            [
                Variant("stock", stock),
                Variant("zero-bubble", (*stock, "--adaptra", "--adaptra-plan-csv", str(csv)), like="stock"),
                Variant("adaptra", (*longer, "--adaptra", "--adaptra-max-in-flight", str(case.cap))),
            ],
            timeout_s=300,
            server=server,
            directory=directory / "run",
        )
    check_equal(reports)
    by_name = {report.name: report for report in reports}
    assert by_name["adaptra"].losses[:STOCK_ITERATIONS] == by_name["stock"].losses, "losses differ from stock's"
    return summarise(case, by_name, zero_bubble)


def summarise(case: Case, reports: dict[str, VariantReport], zero_bubble: Schedule) -> Row:
    adaptra = reports["adaptra"]
    measured = costs_from_json(adaptra.adaptra[0]["measured_costs"])
    ran = schedule_from_csv(adaptra.adaptra[0]["schedule_csv"], chunks=case.chunks)
    stock = stock_order(case.stages, case.micro_batches, case.chunks)

    def simulated_s(order: Schedule, *, blocking: bool = False) -> float:
        return simulate(order, measured, blocking=blocking).makespan_s / case.stretch

    return Row(
        case=case,
        stock=times(reports["stock"], case.stretch),
        zero_bubble=times(reports["zero-bubble"], case.stretch),
        adaptra=times(adaptra, case.stretch),
        bound_s=lower_bound(case.costs()).seconds,
        simulated_stock_s=simulated_s(stock, blocking=True) if case.chunks == 1 else None,
        simulated_zero_bubble_s=simulated_s(zero_bubble),
        simulated_adaptra_s=simulated_s(ran),
        peak_in_flight=max(rank["peak_in_flight"] for rank in adaptra.adaptra),
        simulated_peak=max(peak_in_flight(ran, measured.released_at_backward_input)),
    )


def times(report: VariantReport, stretch: float) -> Times:
    return Times(
        statistics.median(report.iteration_seconds[-TIMED_ITERATIONS:]) / stretch,
        statistics.median(report.pipeline_seconds[-TIMED_ITERATIONS:]) / stretch,
    )


def ratio(real: Times, simulated_s: float | None) -> str:
    return "-" if simulated_s is None else f"{real.pipeline_s / simulated_s:.3f}"


def table(rows: list[Row]) -> str:
    """GitHub table, one row per case. Milliseconds are of whole iterations, with the pipeline's in brackets."""
    lines = [
        "| stages x chunks, micro-batches | F/B/W ms | latency ms | stock ms | zero bubble ms | adaptra ms | "
        "lower bound ms | stock / adaptra | pipeline / bound | pipeline / simulated: stock, zero bubble, adaptra | "
        "most in flight: real, simulated, cap |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row.case
        shown = [
            f"{1e3 * t.iteration_s:.0f} ({1e3 * t.pipeline_s:.0f})" for t in (row.stock, row.zero_bubble, row.adaptra)
        ]
        lines.append(
            f"| {case.stages} x {case.chunks}, {case.micro_batches} | {'/'.join(f'{v:g}' for v in case.compute_ms)} | "
            f"{case.latency_ms:g} | {' | '.join(shown)} | {row.bound_s * 1e3:.0f} | "
            f"{row.stock.iteration_s / row.adaptra.iteration_s:.2f} | {row.adaptra.pipeline_s / row.bound_s:.3f} | "
            f"{ratio(row.stock, row.simulated_stock_s)}, {ratio(row.zero_bubble, row.simulated_zero_bubble_s)}, "
            f"{ratio(row.adaptra, row.simulated_adaptra_s)} | "
            f"{row.peak_in_flight:g}, {row.simulated_peak:g}, {case.cap:g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only latencies 0 and 60 ms")
    parser.add_argument("--stretch", type=float, default=1.0, help="times as long that all is emulated")
    parser.add_argument("--output", type=Path, default=None, help="also write the table to this file")
    arguments = parser.parse_args()
    rows = []
    started = time.monotonic()
    with ForkServer() as server:
        for case in cases(arguments.quick, arguments.stretch):
            rows.append(measure(case, server))
            print(f"[{time.monotonic() - started:5.0f} s] {table(rows[-1:]).splitlines()[-1]}", flush=True)
    stretch = f"{arguments.stretch:g}"
    text = (
        "# Pipelines in real processes\n\n"
        f"Written by `python benchmarks/pipeline.py --stretch {stretch}`: all emulated {stretch} times as long, "
        f"and divided by that.\n\n{table(rows)}"
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
