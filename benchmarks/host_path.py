# SPDX-License-Identifier: Apache-2.0
"""What a second path per link costs while nothing fails, in use or in reserve: iteration times of real processes.

    python benchmarks/host_path.py [--rounds 4] [--output benchmarks/results/host_path.md]

Eight stages with emulated compute run the same fixed order without a fault: links with one path (torch.distributed),
then with two: all messages by the host path over shm, over tcp, and by the device path with the host path in reserve.
One after the other on the same processes, round after round; each ratio is of two trainings of one round. Losses and
parameters are compared bitwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from adaptra_megatron.schedule.classic import zb_h1
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

STAGES, MICRO_BATCHES = 8, 24
COMPUTE_MS = (40.0, 40.0, 40.0)
"""F, B, W: long compared with the real work of a message of 128 KiB by processes that share two cores."""
TIMED_ITERATIONS = 4
ITERATIONS = 1 + TIMED_ITERATIONS
"""The first pays for connections and fresh memory."""
ITEM_NBYTES = 4
TWO_PATHS = {
    "host path, shm": ("shm", "host"),
    "host path, tcp": ("tcp", "host"),
    "device path": ("auto", "device"),
}
"""--adaptra-host-transport and --adaptra-path, by what the table calls them."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """One size of message: float32 of (sequence, micro-batch size 1, hidden)."""

    hidden: int
    sequence: int

    @property
    def message_kib(self) -> float:
        return self.hidden * self.sequence * ITEM_NBYTES / 1024

    def arguments(self, plan: Path) -> tuple[str, ...]:
        words = [
            f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES}",
            f"--global-batch-size {MICRO_BATCHES} --train-iters {ITERATIONS}",
            f"--mock-data --no-gradient-accumulation-fusion --hidden-size {self.hidden} --seq-length {self.sequence}",
            f"--emulate-compute-ms {','.join(f'{value:g}' for value in COMPUTE_MS)}",
            f"--adaptra --adaptra-plan-csv {plan}",
        ]
        return tuple(" ".join(words).split())


CASES = (Case(hidden=32, sequence=16), Case(hidden=128, sequence=256))


def name_of(path: str, round_number: int) -> str:
    return f"{path} {round_number}"


def measure(case: Case, rounds: int, server: ForkServer) -> list[VariantReport]:
    """All variants of all rounds. Raises ResultsDifferError unless every one has the numbers of the first."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        plan = directory / "plan.csv"
        plan.write_text(schedule_to_csv(zb_h1(STAGES, MICRO_BATCHES)))
        first = name_of("torch.distributed", 0)
        variants = []
        for number in range(rounds):
            like = first if number else None
            one = ("--adaptra-host-transport", "off")
            variants.append(Variant(name_of("torch.distributed", number), (*case.arguments(plan), *one), like=like))
            for name, (transport, path) in TWO_PATHS.items():
                two = ("--adaptra-host-transport", transport, "--adaptra-path", path)
                variants.append(Variant(name_of(name, number), (*case.arguments(plan), *two), like=first))
        reports = run_variants(STAGES, variants, timeout_s=TIMEOUT_S, server=server, directory=directory / "run")
    check_equal(reports)
    return reports


def seconds(report: VariantReport) -> float:
    return statistics.median(report.iteration_seconds[-TIMED_ITERATIONS:])


def rows(case: Case, reports: list[VariantReport], rounds: int) -> list[str]:
    by_name = {report.name: report for report in reports}
    plain = [seconds(by_name[name_of("torch.distributed", number)]) for number in range(rounds)]
    lines = []
    for name in TWO_PATHS:
        ours = [seconds(by_name[name_of(name, number)]) for number in range(rounds)]
        costs = [100 * (mine / its - 1) for mine, its in zip(ours, plain, strict=True)]
        late = max(by_name[name_of(each, n)].overruns for each in ("torch.distributed", name) for n in range(rounds))
        lines.append(
            f"| {case.message_kib:g} KiB | {name} | {1e3 * statistics.median(plain):.1f} | "
            f"{1e3 * statistics.median(ours):.1f} | {statistics.median(costs):+.2f}% | "
            f"{min(costs):+.2f}..{max(costs):+.2f}% | {100 * late:.1f}% |"
        )
    return lines


def header(rounds: int) -> str:
    compute = "/".join(f"{value:g}" for value in COMPUTE_MS)
    return "\n".join(
        [
            "# Cost of a second path per link while nothing fails",
            "",
            f"Written by `python benchmarks/host_path.py --rounds {rounds}` on {os.cpu_count()} cores, which "
            f"{STAGES} stages and as many",
            f"delegates share. ZB-H1's order, {MICRO_BATCHES} micro-batches, F/B/W {compute} ms, no fault; medians of "
            f"{TIMED_ITERATIONS} iterations,",
            f"then of {rounds} rounds. Overruns: the most that any training had of operations whose real work took "
            "longer than",
            "the time emulated. All trainings ended with the same losses and parameters, bit for bit.",
            "",
            "| message | two paths, all messages by the | one path ms | two paths ms | cost | of rounds | overruns |",
            "|---|---|---|---|---|---|---|",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=None, help="also write the table to this file")
    arguments = parser.parse_args()
    print(header(arguments.rounds), flush=True)
    lines = []
    with ForkServer() as server:
        for case in CASES:
            found = rows(case, measure(case, arguments.rounds, server), arguments.rounds)
            print("\n".join(found), flush=True)
            lines += found
    if arguments.output is not None:
        arguments.output.write_text("\n".join([header(arguments.rounds), *lines]) + "\n")


if __name__ == "__main__":
    main()
