# SPDX-License-Identifier: Apache-2.0
"""How long what-if questions take at their largest. Prints a table and writes it to benchmarks/results/what_if.md.

    python benchmarks/what_if.py [--repeats 3]

Times whole commands, from the start of Python to the last byte of their output.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parent / "results" / "what_if.md"
STAGES, MICRO_BATCHES, REPLICAS = 64, 1024, 256


def pipeline(chunks: int, *, even: bool) -> dict[str, Any]:
    """A pipeline with a slow link, and room for 1.5 activations per stage; `even`: all stages take the same."""
    rng = random.Random(chunks)

    def table() -> float | list[list[float]]:
        if even:
            return 0.02 / chunks
        return [[rng.uniform(0.019, 0.021) / chunks for _ in range(chunks)] for _ in range(STAGES)]

    return {
        "stages": STAGES,
        "chunks": chunks,
        "micro_batches": MICRO_BATCHES,
        "forward_s": table(),
        "backward_input_s": table(),
        "backward_weight_s": table(),
        "links": slow_link(30, 0.06),
        "max_in_flight": 96 if chunks == 1 else 200,
    }


def slow_link(stage: int, latency_s: float) -> list[dict[str, Any]]:
    ends = ((stage, stage + 1), (stage + 1, stage))
    return [{"from": source, "to": target, "latency_s": latency_s} for source, target in ends]


def job(different: int) -> dict[str, Any]:
    """256 replicas, `different` of which have a slow link of their own."""
    rng = random.Random(different)
    overrides = [
        {"replicas": [replica], "links": slow_link(rng.randrange(STAGES - 1), rng.uniform(0.01, 0.06))}
        for replica in range(different)
    ]
    replicas = {"count": REPLICAS, "overrides": overrides}
    return {**pipeline(1, even=True), "links": [], "replicas": replicas}


def timed(document: dict[str, Any], command: Sequence[str], repeats: int) -> tuple[float, float]:
    """Median wall seconds of the command, and the gap to the bound that it tells."""
    with tempfile.TemporaryDirectory() as directory:
        costs = Path(directory) / "costs.json"
        costs.write_text(json.dumps(document))
        name, *options = command
        line = [sys.executable, "-m", "adaptra_megatron.tools.cli", name, str(costs), *options, "--json"]
        wall_s = []
        for _ in range(repeats):
            start = time.perf_counter()
            ran = subprocess.run(line, capture_output=True, check=True, timeout=300)
            wall_s.append(time.perf_counter() - start)
    return statistics.median(wall_s), json.loads(ran.stdout)["gap"]


def rows(repeats: int) -> list[str]:
    lines = []

    def add(what: str, document: dict[str, Any], *command: str, count: int = repeats) -> None:
        wall_s, gap = timed(document, command, count)
        lines.append(f"| {what} | `{' '.join(command)}` | {wall_s:.2f} s | {100 * gap:.2f}% |")
        print(lines[-1], flush=True)

    for chunks, names in ((1, ("gpipe", "1f1b", "zb-h1")), (2, ("gpipe", "interleaved", "interleaved-split"))):
        for even in (True, False):
            document = pipeline(chunks, even=even)
            what = f"{chunks} chunk{'s' if chunks > 1 else ''}, {'equal' if even else 'unequal'} stages"
            for name in (*names, "online") if even else ("online",):
                add(what, document, "simulate", "--schedule", name)
            if even:
                add(what, document, "simulate", "--schedule", names[1], "--blocking")
            add(what, document, "plan")
    for different in (8, REPLICAS):
        what = f"{REPLICAS} replicas, {different} with a slow link of their own"
        add(what, job(different), "simulate", "--schedule", "zb-h1")
        add(what, job(different), "simulate", "--schedule", "online", count=1)
        add(what, job(different), "plan", count=1)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command, but for the longest")
    arguments = parser.parse_args()
    lines = [
        "# What-if questions at their largest",
        "",
        "Written by `python benchmarks/what_if.py`: whole commands, from the start of Python to the end of their JSON.",
        f"{STAGES} stages x {MICRO_BATCHES} micro-batches; with {REPLICAS} replicas, {STAGES * REPLICAS} ranks. Two",
        "cores. The gap is that of the schedule to the proven lower bound.",
        "",
        "| case | command | wall | gap |",
        "|---|---|---|---|",
        *rows(arguments.repeats),
    ]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
