# SPDX-License-Identifier: Apache-2.0
"""Cost of recovery while no rank fails, with and without the distributed optimizer; and what a plan saves for a link
that turns slow once a failed rank has rejoined.

    python benchmarks/fault_tolerance.py [--rounds 5] [--action-ms 20]

Trainings in real processes, compute emulated by sleeping, once with `--adaptra-reroute stragglers` and once with
`--adaptra-reroute all`, which adds attempts, commits, counts of micro-batches and groups that survive failures of
their members; in pairs, in one order and the other; and what the counts alone add. Then trainings in which a rank fails
and rejoins, and a link turns slow on both paths. Writes benchmarks/results/fault_tolerance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

import torch

from adaptra_megatron.tools.local_ranks.launch_ranks import BRIEF_LOOKUPS, run_ranks
from testing.jobs.fault_tolerant_jobs import Host, run_with_failures
from testing.jobs.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[1]
REPLICAS, STAGES, MICRO_BATCHES, ITERATIONS, FIRST = 2, 2, 8, 24, 6
"""Iterations before the FIRST are not counted: plans change in them."""
SLOW_FROM, SETTLED = 12, 4
"""Iterations: the first with a slow link, which two run by the plan from before; how many later another is in force."""
LIMIT_S = 300.0
COUNTED_WIDTHS = (64, 1024)
CASES = {"every rank has the whole optimizer": "", "--use-distributed-optimizer": "--use-distributed-optimizer"}


def iteration_s(flags: str, reroute: str, action_ms: int, server: ForkServer) -> float:
    """Median seconds of an iteration, optimizer step included."""
    with tempfile.TemporaryDirectory() as directory:
        times = _times(f"{_common(action_ms, directory)} --adaptra-reroute {reroute} {flags}", Path(directory), server)
        return median(max(each) for each in list(zip(*times, strict=True))[FIRST:])


def _common(action_ms: int, directory: str) -> str:
    return (
        f"--emulate-cpu --pipeline-model-parallel-size {STAGES} --num-layers {2 * STAGES} --hidden-size 64 "
        f"--seq-length 16 --mock-data --no-gradient-accumulation-fusion --train-iters {ITERATIONS} "
        f"--global-batch-size {REPLICAS * MICRO_BATCHES} --emulate-compute-ms {action_ms},{action_ms},{action_ms} "
        f"--adaptra --adaptra-host-transport shm --dump-state {directory}"
    )


def _times(arguments: str, directory: Path, server: ForkServer, *, restarts: int = 0) -> list[list[float]]:
    """Seconds of the iterations of each rank."""
    argv, size = [str(ROOT / "scripts" / "train_gpt.py"), *arguments.split()], REPLICAS * STAGES
    host = Host(size, restarts=restarts)
    results = run_with_failures(
        size, argv, timeout_s=LIMIT_S, log_directory=directory / "logs", server=server, host=host
    )
    assert not any(each.returncode for each in results), results[0].output[-2000:]
    return [torch.load(path, weights_only=True)["times"] for path in sorted(directory.glob("rank*.pt"))]


def after_return_s(action_ms: int, server: ForkServer) -> tuple[float, float]:
    """Median seconds of an iteration with a slow link by the plan from before, and by the one that is made for it."""
    latency_ms = 10 * action_ms
    with tempfile.TemporaryDirectory() as directory:
        arguments = (
            f"{_common(action_ms, directory)} --adaptra-reroute all --emulate-exact-times --emulate-prompt-planner "
            f"--adaptra-max-in-flight {MICRO_BATCHES} --emulate-death 1:1:2 --emulate-wait-for-arrivals 4 "
            f"--emulate-slow-link 0>1:latency_ms={latency_ms},from={SLOW_FROM},path=both"
        )
        times = _times(arguments, Path(directory), server, restarts=1)
        # The rank that came back has no times of those before it.
        seconds = [max(each) for each in zip(*(each[SLOW_FROM - ITERATIONS :] for each in times), strict=True)]
        return median(seconds[:2]), median(seconds[SETTLED:])


def table(rounds: int, action_ms: int, server: ForkServer) -> list[str]:
    """Lines of the page's table."""
    lines = ["| | iteration, s | with recovery, s | ratio (median) | ratios |", "|---|---|---|---|---|"]
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


def counting(server: ForkServer) -> list[str]:
    """Lines of the table of what counts of micro-batches add to an iteration."""
    lines = ["| gradients of a rank | optimizer | CPU time, us | time, us |", "|---|---|---|---|"]
    for width in COUNTED_WIDTHS:
        for optimizer in ("whole", "sharded"):
            argv = [str(ROOT / "benchmarks" / "fault_tolerance_rank.py"), str(width), str(MICRO_BATCHES), optimizer]
            with tempfile.TemporaryDirectory() as directory:
                results = run_ranks(REPLICAS, argv, timeout_s=LIMIT_S, server=server, log_directory=directory)
                found = [json.loads(each.output.partition("ADDED ")[2].partition("\n")[0]) for each in results]
            cpu_us, us = (max(each) for each in zip(*found, strict=True))
            lines.append(f"| {8 * width * width / 1e6:.3g} MB | {optimizer} | {cpu_us:.0f} | {us:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--action-ms", type=int, default=20, help="of each F, I and W")
    arguments = parser.parse_args()
    os.environ |= BRIEF_LOOKUPS
    with ForkServer() as server:
        costs = table(arguments.rounds, arguments.action_ms, server)
        counts = counting(server)
        returns = [after_return_s(arguments.action_ms, server) for _ in range(arguments.rounds)]
    pairs = ", ".join(f"{before:.2f} and {after:.2f}" for before, after in returns)
    lines = [
        "# Cost of recovery while no rank fails",
        "",
        "Written by `python benchmarks/fault_tolerance.py`.",
        "",
        f"{REPLICAS} replicas of {STAGES} stages, {MICRO_BATCHES} micro-batches, F = I = W = {arguments.action_ms} ms "
        f"of emulated compute, {REPLICAS * STAGES} processes on {os.cpu_count()} cores;",
        f"medians of {ITERATIONS - FIRST} iterations, {arguments.rounds} pairs.",
        "",
        *costs,
        "",
        "## Of that, counting micro-batches",
        f"{REPLICAS} replicas without computation, {MICRO_BATCHES} micro-batches, two buckets, in turn with counts and "
        "without; medians of the rank",
        "that has most. Gradients are fp32, over gloo, which reduces them in memory of its own where they are counted.",
        "",
        *counts,
        "",
        "## A link turns slow once a failed rank has rejoined",
        f"The same training, in which rank 1 fails and rejoins, and from iteration {SLOW_FROM} on a message from "
        "stage 0 to stage 1",
        f"takes {10 * arguments.action_ms} ms longer on either path. Seconds of an iteration by the plan from before "
        f"and, from {SETTLED} iterations",
        f"later on, by the one that is made for it: {pairs}.",
    ]
    page = ROOT / "benchmarks" / "results" / "fault_tolerance.md"
    page.write_text("\n".join(lines) + "\n")
    print(page.read_text())


if __name__ == "__main__":
    main()
