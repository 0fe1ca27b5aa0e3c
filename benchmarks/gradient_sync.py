# SPDX-License-Identifier: Apache-2.0
"""Exposed time of all-reduces around a straggler, over an emulated wire, held against the model and a ring.

    python benchmarks/gradient_sync.py [--output benchmarks/results/gradient_sync.md]

Real processes and messages; each message is sent as late as the wire would have carried it, so that nothing depends on
this machine's speed but what the executor itself takes. The exposed time is from the straggler's arrival until the last
rank has the sum. Algorithms run in turn, round after round, and what is compared are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from adaptra_megatron.emulation.jobs.launch import run_ranks
from adaptra_megatron.schedule.all_reduce.costs import Wire, hidden_s, ring_s, stragglar_s

NBYTES = 4 * 8 * 7 * 60
"""Divisible into the chunks of all algorithms."""
WIRE = Wire(latency_s=0.006, byte_s=1.2 / NBYTES)
RANKS, REPEATS = (4, 8), 5
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gradient_sync.md")
    text = f"""# Gradient synchronisation around a straggler

Written by `python benchmarks/gradient_sync.py`.

Processes on one machine, gloo, an emulated wire of {WIRE.latency_s * 1e3:g} ms per message and
{WIRE.byte_s * NBYTES:g} s for the whole buffer; median of {REPEATS} rounds. The exposed time is from the straggler's
arrival until the last rank has the sum; the ring is this package's own executor, too.

{table()}
"""
    parser.parse_args().output.write_text(text)
    print(text)
