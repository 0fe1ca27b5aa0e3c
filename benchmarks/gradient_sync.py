# SPDX-License-Identifier: Apache-2.0
"""Exposed time of all-reduces around a straggler, over an emulated wire, held against the model and a ring.

    python benchmarks/gradient_sync.py [--output benchmarks/results/gradient_sync.md]
    python benchmarks/gradient_sync.py --end-to-end

Real processes and messages; each message is sent as late as the wire would have carried it, so that nothing depends on
this machine's speed but what the executor itself takes. The exposed time is from the straggler's arrival until the last
rank has the sum. Algorithms run in turn, round after round, and what is compared are medians of ratios within a round.
Then, or with `--end-to-end` alone and printed only: iterations of trainings with Megatron's DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from adaptra_megatron.gradsync.all_reduce_algorithms import AllReduceWire, hidden_s, ring_s, stock_s, stragglar_s
from adaptra_megatron.gradsync.replica_sums import PERSISTENT
from adaptra_megatron.tools.local_ranks.launch_ranks import run_ranks

NBYTES = 4 * 8 * 7 * 60
"""Divisible into the chunks of all algorithms."""
WIRE = AllReduceWire(latency_s=0.006, byte_s=1.2 / NBYTES)
RANKS, REPEATS = (4, 8), 3
DELAYS = (0.0, 0.5, 1.0, 2.0)
"""How late the straggler is, in times that a ring takes."""
ALGORITHMS = ("ring", "stragglar", "hidden")
SCRIPT = Path(__file__).with_name("gradient_sync_rank.py")


def model_s(algorithm: str, ranks: int, delay_s: float) -> float:
    """Exposed seconds by the cost model."""
    if algorithm == "ring":
        return ring_s(ranks, NBYTES, WIRE)
    return (stragglar_s if algorithm == "stragglar" else hidden_s)(ranks, NBYTES, WIRE, delay_s)


def measured(ranks: int) -> dict[tuple[str, float], list[float]]:
    """Exposed seconds of each round, by algorithm and delay in rings."""
    runs = [
        (algorithm, delay, delay * ring_s(ranks, NBYTES, WIRE))
        for _ in range(REPEATS)
        for delay in DELAYS
        for algorithm in ALGORITHMS
    ]
    with tempfile.TemporaryDirectory() as directory:
        cases = Path(directory) / "cases.json"
        given = {"wire": WIRE, "nbytes": NBYTES, "runs": [(algorithm, delay_s) for algorithm, _, delay_s in runs]}
        cases.write_text(json.dumps(given))
        run_ranks(ranks, [str(SCRIPT), str(cases), directory], timeout_s=400, log_directory=directory)
        times = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]
    found: dict[tuple[str, float], list[float]] = {}
    for number, (algorithm, delay, _) in enumerate(runs):
        arrival_s = times[ranks - 1][number][0]
        found.setdefault((algorithm, delay), []).append(max(each[number][1] for each in times) - arrival_s)
    return found


def table() -> str:
    """One row per number of ranks, delay and algorithm."""
    head = ("ranks", "delay (rings)", "algorithm", "exposed", "model", "off by", "faster than ring", "range")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for ranks in RANKS:
        found = measured(ranks)
        for delay in DELAYS:
            for algorithm in ALGORITHMS:
                taken, rings = found[algorithm, delay], found["ring", delay]
                expected_s = model_s(algorithm, ranks, delay * ring_s(ranks, NBYTES, WIRE))
                ratios = [ring / own for ring, own in zip(rings, taken, strict=True)]
                rows.append(
                    (
                        str(ranks),
                        f"{delay:g}",
                        algorithm,
                        f"{median(taken) * 1e3:.0f} ms",
                        f"{expected_s * 1e3:.0f} ms",
                        f"{median(taken) / expected_s - 1:+.1%}",
                        f"{median(ratios):.2f}",
                        f"{min(ratios):.2f} to {max(ratios):.2f}",
                    )
                )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
MODEL_NBYTES = 38336
"""Size of its gradients: one bucket, as without --overlap-grad-reduce."""
TRAINING_WIRE = AllReduceWire(latency_s=0.0003, byte_s=3.0 / MODEL_NBYTES)
REPLICAS = 8
SYNC_S = stock_s(REPLICAS, MODEL_NBYTES, TRAINING_WIRE)
COMPUTE_S = 0.1 * SYNC_S
MOST = (COMPUTE_S + 2 * SYNC_S) / (COMPUTE_S + SYNC_S + TRAINING_WIRE.byte_s * MODEL_NBYTES)
COUNTED = 3
"""Iterations that count, behind those in which the delay is not sure yet."""


def iterations_s(mode: str, late_s: float) -> tuple[list[float], dict[str, int]]:
    """Seconds of the iterations that count of one training, and how often the first rank has used each algorithm."""
    compute_ms = ",".join(f"{1e3 * COMPUTE_S * share:.3f}" for share in (0.25, 0.5, 0.25))
    slow = f"--emulate-slow-cell {REPLICAS - 1}.0:{1 + late_s / COMPUTE_S}" if late_s else ""
    iterations = COUNTED + (1 if mode == "stock" else 1 + PERSISTENT)
    flags = (
        f"--emulate-cpu --distributed-backend gloo --mock-data --no-gradient-accumulation-fusion {MODEL} "
        f"--global-batch-size {REPLICAS} --train-iters {iterations} --emulate-compute-ms {compute_ms} {slow} "
        f"--adaptra --adaptra-gradient-sync {mode}"
    )
    with tempfile.TemporaryDirectory() as directory:
        given = Path(directory) / "wire.json"
        given.write_text(json.dumps({"wire": TRAINING_WIRE, "nbytes": MODEL_NBYTES}))
        argv = [str(SCRIPT), "train", str(given), directory, *flags.split()]
        run_ranks(REPLICAS, argv, timeout_s=400, log_directory=directory)
        taken, used = json.loads((Path(directory) / "0.json").read_text())
        print(mode, f"{late_s:.2f} s late:", taken, used, file=sys.stderr, flush=True)
    return taken[-COUNTED:], used


def training_table() -> str:
    """One row per delay and mode."""
    head = ("delay of the last replica", "mode", "used, of all iterations", "iteration", "range", "faster than stock")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for late_s, named in ((SYNC_S, "one all-reduce"), (0.0, "none")):
        stock = 0.0
        for mode in ("stock", "auto"):
            taken, used = iterations_s(mode, late_s)
            stock = median(taken) if mode == "stock" else stock
            algorithms = ", ".join(f"{count} {name}" for name, count in sorted(used.items()))
            spread = f"{min(taken):.2f} to {max(taken):.2f} s"
            rows.append((named, mode, algorithms, f"{median(taken):.2f} s", spread, f"{stock / median(taken):.2f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gradient_sync.md")
    parser.add_argument("--end-to-end", action="store_true", help="trainings alone, without a results page")
    options = parser.parse_args()
    if options.end_to_end:
        print(training_table())
        raise SystemExit
    text = f"""# Gradient synchronisation around a straggler

Written by `python benchmarks/gradient_sync.py`.

Processes on one machine, gloo, an emulated wire of {WIRE.latency_s * 1e3:g} ms per message and
{WIRE.byte_s * NBYTES:g} s for the whole buffer; median of {REPEATS} rounds. The exposed time is from the straggler's
arrival until the last rank has the sum; the ring is this package's own executor, too.

{table()}

## Whole iterations

Trainings of {REPLICAS} replicas, with Megatron's DistributedDataParallel and one bucket, whose sum is exposed as a
whole. Computation lasts {COMPUTE_S:.2f} s, by sleeping, and a library's all-reduce {SYNC_S:.2f} s, over an emulated
wire of {TRAINING_WIRE.latency_s * 1e3:g} ms per message and {TRAINING_WIRE.byte_s * MODEL_NBYTES:g} s for the whole
buffer: by the cost model, with as few messages as an all-reduce can have. Messages of `auto`, by which replicas share
their times, go over the same wire. One replica computes longer than all others, by the delay. Medians of the last
{COUNTED} iterations, in which `auto` has made its choice. No iteration can be shorter than the last replica's
computation and the time that its gradients take on its link: {MOST:.2f} times as fast as stock's.

{training_table()}
"""
    options.output.write_text(text)
    print(text)
