# SPDX-License-Identifier: Apache-2.0
"""Replicas with slow links of their own: each plans for its own costs, and is held against its own bound.

    python benchmarks/replicas.py [--output benchmarks/results/replicas.md]

Real processes, 4 replicas of 4 stages, emulated compute: in three of them another link is slow on both of its paths.
Stock and adaptra train one after the other on the same processes; losses and parameters are compared bitwise. A
replica's time is from its first action's start to its last one's end (the reduction of gradients, which all replicas
wait for, is not in it), median over the last iterations; bounds are proven for the emulated times and the cap.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.telemetry.trace import RankTrace, read_traces
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

REPLICAS, STAGES, MICRO_BATCHES, CAP = 4, 4, 16, 10
ACTION_MS = 40
ITERATIONS, JUDGED = 12, 5
SLOW_LINKS = {0: (0, 60), 1: (1, 100), 2: (2, 80)}
"""By replica: the first stage of its slow link, and that link's latency in milliseconds."""


def costs_of(replica: int) -> Costs:
    """Emulated costs of one replica."""
    links = {}
    if replica in SLOW_LINKS:
        stage, latency_ms = SLOW_LINKS[replica]
        links = dict.fromkeys([(stage, stage + 1), (stage + 1, stage)], LinkCost(latency_ms / 1e3))
    seconds = dict.fromkeys(("forward_s", "backward_input_s", "backward_weight_s"), ACTION_MS / 1e3)
    return uniform_costs(STAGES, MICRO_BATCHES, links=links, max_in_flight=CAP, **seconds)


def arguments() -> list[str]:
    """Arguments of both trainings, stock's and adaptra's."""
    words = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --hidden-size 32 --seq-length 16 --mock-data "
        f"--no-gradient-accumulation-fusion --global-batch-size {MICRO_BATCHES * REPLICAS} "
        f"--train-iters {ITERATIONS} --emulate-compute-ms {ACTION_MS},{ACTION_MS},{ACTION_MS}"
    ).split()
    for replica, (stage, latency_ms) in SLOW_LINKS.items():
        words += [
            "--emulate-slow-link",
            f"{stage}-{stage + 1}:latency_ms={latency_ms},path=both,pipeline={replica}",
        ]
    return words


def replica_s(traces: Sequence[RankTrace], replica: int) -> float:
    """Median seconds of a replica's iterations; ranks of a stage follow each other, one of each replica."""
    seconds = []
    for iteration in range(ITERATIONS - JUDGED, ITERATIONS):
        records = [record for trace in traces[replica::REPLICAS] for record in trace.iteration(iteration)]
        seconds.append(max(each.end_s for each in records) - min(each.start_s for each in records))
    return median(seconds)


def trained() -> tuple[VariantReport, VariantReport, list[RankTrace]]:
    """Reports of stock and adaptra, which are equal to the bit, and adaptra's traces."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "trace"
        ours = ["--adaptra", "--adaptra-max-in-flight", str(CAP), "--adaptra-trace-dir", str(run)]
        stock, adaptra = run_variants(
            REPLICAS * STAGES,
            [Variant("stock", tuple(arguments())), Variant("adaptra", (*arguments(), *ours), like="stock")],
            timeout_s=600,
            directory=name,
        )
        check_equal([stock, adaptra])
        return stock, adaptra, read_traces(run)


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    stock, adaptra, traces = trained()
    lines = [
        "# Replicas with slow links of their own",
        "",
        f"Written by `python benchmarks/replicas.py` on {os.cpu_count()} cores, "
        f"which {REPLICAS * STAGES} processes share.",
        "",
        "| replica | slow link | this replica, s | its bound, s | ratio |",
        "|---|---|---|---|---|",
    ]
    for replica in range(REPLICAS):
        slow = "none"
        if replica in SLOW_LINKS:
            stage, latency_ms = SLOW_LINKS[replica]
            slow = f"{stage}-{stage + 1}, {latency_ms} ms"
        took_s, bound_s = replica_s(traces, replica), lower_bound(costs_of(replica)).seconds
        lines.append(f"| {replica} | {slow} | {took_s:.3f} | {bound_s:.3f} | {took_s / bound_s:.3f} |")
    whole_s = [median(report.pipeline_seconds[-JUDGED:]) for report in (stock, adaptra)]
    lines += [
        "",
        f"{REPLICAS} replicas of {STAGES} stages, {MICRO_BATCHES} micro-batches each, F = I = W = {ACTION_MS} ms, "
        f"cap {CAP}; bitwise equal to stock ({adaptra.elements_compared} numbers compared). "
        f"All replicas together: stock {whole_s[0]:.3f} s, adaptra {whole_s[1]:.3f} s.",
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
