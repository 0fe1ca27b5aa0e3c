# SPDX-License-Identifier: Apache-2.0
"""Online dispatch against fixed orders, in real processes on an emulated cluster whose links delay messages at random.

    python benchmarks/online.py [--mean-ms 20,40,60,120] [--constant-ms 0,60,120] [--every-link] [--output FILE]

Every row is one job in which the same model is trained with one order after the other on the same processes: compute is
emulated (F, B and W last 20 ms each), and each message of the slow link takes an exponentially distributed time of the
given mean, the same sequence of times for every order. Fixed orders are planned for that mean, and for the time that 95
percent of messages stay below; online dispatch starts from either plan. Caps are the same, and so are losses, to the
bit. Messages go by torch.distributed (gloo, whose arrivals the CPU sees) or, with --host-path, by the host path, whose
delegates are as many processes again. Times are means over iterations of the forward_backward function alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import plan
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

STAGES, MICRO_BATCHES = 8, 24
ACTION_MS = 20.0
CAP = 24
MIDDLE = ((3, 4),)
EVERY = tuple((stage, stage + 1) for stage in range(STAGES - 1))
HIGH_QUANTILE = -math.log(0.05)
"""Quantile of an exponential distribution, in means: 95 percent of messages take less."""
SEED = 11


@dataclass(frozen=True)
class Case:
    """Which links are slow, by how much, and what a stage may hold."""

    links: tuple[tuple[int, int], ...]
    cap: int
    delay_ms: float
    random: bool
    host_path: bool
    iterations: int
    """Number of iterations that are timed, after one that is not."""

    def costs(self, latency_ms: float) -> Costs:
        cost = LinkCost(latency_ms / 1e3)
        both_ways = [(a, b) for a, b in self.links] + [(b, a) for a, b in self.links]
        return uniform_costs(
            STAGES,
            MICRO_BATCHES,
            forward_s=ACTION_MS / 1e3,
            backward_input_s=ACTION_MS / 1e3,
            backward_weight_s=ACTION_MS / 1e3,
            links=dict.fromkeys(both_ways, cost),
            max_in_flight=self.cap,
        )

    def planned(self, latency_ms: float) -> Schedule:
        return plan(self.costs(latency_ms), deadline_s=1.0).schedule

    def arguments(self) -> tuple[str, ...]:
        kind = "exponential_ms" if self.random else "latency_ms"
        words = [
            f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES}",
            f"--train-iters {1 + self.iterations} --mock-data --no-gradient-accumulation-fusion",
            f"--hidden-size 32 --seq-length 16 --emulate-compute-ms {ACTION_MS:g},{ACTION_MS:g},{ACTION_MS:g}",
            f"--adaptra --adaptra-max-in-flight {self.cap}",
        ]
        if self.host_path:
            words.append("--adaptra-host-transport shm --adaptra-path host")
        if self.delay_ms:
            words += [
                f"--emulate-slow-link {a}-{b}:{kind}={self.delay_ms:g},path=both,seed={SEED}" for a, b in self.links
            ]
        return tuple(" ".join(words).split())


@dataclass(frozen=True)
class Order:
    """What one variant of a case runs."""

    name: str
    planned_for_ms: float
    dispatch: str


def measure(case: Case, orders: Sequence[Order], server: ForkServer) -> dict[str, VariantReport]:
    """Train with each order. Raises ResultsDifferError if numbers differ, AssertionError if nothing came by chance."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        variants: list[Variant] = []
        for order in orders:
            csv = directory / f"{order.name}.csv"
            csv.write_text(schedule_to_csv(case.planned(order.planned_for_ms)))
            flags = ("--adaptra-plan-csv", str(csv), "--adaptra-dispatch", order.dispatch)
            like = variants[0].name if variants else None
            variants.append(Variant(order.name, (*case.arguments(), *flags), like=like))
        reports = run_variants(STAGES, variants, timeout_s=270, server=server, directory=directory / "run")
    if len(reports) > 1:
        check_equal(reports)
    for order, report in zip(orders, reports, strict=True):
        assert not case.delay_ms or report.links_struck, "no message was delayed"
        if case.random:
            moved = sum(rank["moved_actions"] for rank in report.adaptra)
            assert bool(moved) == (order.dispatch == "online"), f"{order}: {moved} actions moved"
    return {report.name: report for report in reports}


def mean_s(report: VariantReport) -> float:
    return statistics.fmean(report.pipeline_seconds[1:])


def random_row(case: Case, server: ForkServer) -> str:
    orders = [
        Order("mean", case.delay_ms, "planned"),
        Order("high", HIGH_QUANTILE * case.delay_ms, "planned"),
        Order("online", case.delay_ms, "online"),
        Order("online-high", HIGH_QUANTILE * case.delay_ms, "online"),
    ]
    reports = measure(case, orders, server)
    mean, high, online, online_high = (mean_s(reports[order.name]) for order in orders)
    moved = sum(rank["moved_actions"] for rank in reports["online"].adaptra)
    actions = 3 * MICRO_BATCHES * STAGES * (1 + case.iterations)
    shown = " | ".join(f"{1e3 * seconds:.0f}" for seconds in (mean, high, online, online_high))
    where = "one" if case.links == MIDDLE else "all"
    return (
        f"| {where}, {case.cap} | {case.delay_ms:g} | {shown} | {mean / online:.2f} | "
        f"{mean / min(online, online_high):.2f} | {min(mean, high) / min(online, online_high):.2f} | "
        f"{100 * moved / actions:.0f} % |"
    )


def constant_row(case: Case, server: ForkServer) -> str:
    orders = [Order("planned", case.delay_ms, "planned"), Order("online", case.delay_ms, "online")]
    reports = measure(case, orders, server)
    planned, online = (mean_s(reports[order.name]) for order in orders)
    bound = lower_bound(case.costs(case.delay_ms)).seconds
    return (
        f"| {case.delay_ms:g} | {1e3 * bound:.0f} | {1e3 * planned:.0f} | {1e3 * online:.0f} | {online / bound:.3f} | "
        f"{online / planned:.3f} |"
    )


RANDOM_HEAD = (
    "| slow links, cap | mean delay ms | planned for the mean ms | planned for 95 % ms | online ms | "
    "online, from the plan for 95 % ms | planned for the mean / online | planned for the mean / best online | "
    "best planned / best online | actions moved |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
CONSTANT_HEAD = (
    "| constant delay ms | lower bound ms | planned for it ms | online ms | online / bound | online / planned |\n"
    "|---|---|---|---|---|---|"
)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean-ms", type=numbers, default=[20.0, 40.0, 60.0, 120.0])
    parser.add_argument("--constant-ms", type=numbers, default=[0.0, 60.0, 120.0])
    parser.add_argument("--every-link", action="store_true", help="all links are slow, and caps are 16")
    parser.add_argument("--host-path", action="store_true", help="messages go by the host path")
    parser.add_argument("--iterations", type=int, default=8, help="timed iterations of each order")
    parser.add_argument("--output", type=Path, default=None, help="also append the tables to this file")
    arguments = parser.parse_args()
    links, cap = (EVERY, 16) if arguments.every_link else (MIDDLE, CAP)
    started = time.monotonic()
    lines: list[str] = []
    with ForkServer() as server:
        for head, row, delays, is_random in (
            (RANDOM_HEAD, random_row, arguments.mean_ms, True),
            (CONSTANT_HEAD, constant_row, arguments.constant_ms, False),
        ):
            lines += [head] if delays else []
            for delay_ms in delays:
                lines.append(
                    row(Case(links, cap, delay_ms, is_random, arguments.host_path, arguments.iterations), server)
                )
                sys.stdout.write(f"[{time.monotonic() - started:4.0f} s] {lines[-1]}\n")
                sys.stdout.flush()
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        with arguments.output.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
