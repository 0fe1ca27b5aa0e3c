# SPDX-License-Identifier: Apache-2.0
"""Cost of being able to outlive ranks while none dies, with and without the distributed optimizer.

    python benchmarks/outliving.py [--rounds 5] [--action-ms 20]

Trainings in real processes, compute emulated by sleeping, once with `--adaptra-reroute stragglers` and once with
`--adaptra-reroute all`, which adds attempts, commits and groups that outlive their members; in pairs, in one order and
the other. Writes benchmarks/results/outliving.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

import torch

from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.launch import BRIEF_LOOKUPS
from adaptra_megatron.emulation.jobs.outlived import run_outlived

ROOT = Path(__file__).resolve().parents[1]
REPLICAS, STAGES, MICRO_BATCHES, ITERATIONS, FIRST = 2, 2, 8, 24, 6
"""Iterations before the FIRST are not counted: plans change in them."""
LIMIT_S = 300.0
CASES = {"every rank has the whole optimizer": "", "--use-distributed-optimizer": "--use-distributed-optimizer"}


def iteration_s(flags: str, reroute: str, action_ms: int, server: ForkServer) -> float:
    """Median seconds of an iteration, optimizer step included."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (
            f"--emulate-cpu --pipeline-model-parallel-size {STAGES} --num-layers {2 * STAGES} --hidden-size 64 "
            f"--seq-length 16 --mock-data --no-gradient-accumulation-fusion --train-iters {ITERATIONS} "
            f"--global-batch-size {REPLICAS * MICRO_BATCHES} --emulate-compute-ms {action_ms},{action_ms},{action_ms} "
            f"--adaptra --adaptra-host-transport shm --adaptra-reroute {reroute} --dump-state {directory} {flags}"
        )
        argv = [str(ROOT / "scripts" / "train_gpt.py"), *arguments.split()]
        logs = Path(directory) / "logs"
        results = run_outlived(REPLICAS * STAGES, argv, timeout_s=LIMIT_S, log_directory=logs, server=server)
        assert not any(each.returncode for each in results), results[0].output[-2000:]
        times = [torch.load(path, weights_only=True)["times"] for path in sorted(Path(directory).glob("rank*.pt"))]
        return median(max(each) for each in list(zip(*times, strict=True))[FIRST:])


def table(rounds: int, action_ms: int) -> list[str]:
    """Lines of the page's table."""
    lines = ["| | iteration, s | able to outlive, s | ratio (median) | ratios |", "|---|---|---|---|---|"]
    with ForkServer() as server:
        for name, flags in CASES.items():
            without, able = list[float](), list[float]()
            for number in range(rounds):
                pair = [(without, "stragglers"), (able, "all")]
                for found, reroute in pair if number % 2 else reversed(pair):
                    found.append(iteration_s(flags, reroute, action_ms, server))
            ratios = sorted(b / a for a, b in zip(without, able, strict=True))
            said = ", ".join(f"{ratio:.4f}" for ratio in ratios)
            lines.append(f"| {name} | {median(without):.4f} | {median(able):.4f} | {median(ratios):.4f} | {said} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--action-ms", type=int, default=20, help="of each F, I and W")
    arguments = parser.parse_args()
    os.environ |= BRIEF_LOOKUPS
    lines = [
        "# Cost of being able to outlive ranks, while none dies",
        "",
        "Written by `python benchmarks/outliving.py`.",
        "",
        f"{REPLICAS} replicas of {STAGES} stages, {MICRO_BATCHES} micro-batches, F = I = W = {arguments.action_ms} ms "
        f"of emulated compute, {REPLICAS * STAGES} processes on {os.cpu_count()} cores;",
        f"medians of {ITERATIONS - FIRST} iterations, {arguments.rounds} pairs.",
        "",
        *table(arguments.rounds, arguments.action_ms),
    ]
    page = ROOT / "benchmarks" / "results" / "outliving.md"
    page.write_text("\n".join(lines) + "\n")
    print(page.read_text())


if __name__ == "__main__":
    main()
