#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plays random jobs on the model of the device, and counts deadlocks for each rule of posting receives.

    python scripts/play_postings.py [--cases 20000] [--others 2000] [--first 0] [--output FILE]

Cases, and the model, are those of tests/support/device_model: 2 to 8 stages, up to 3 chunks and 32 micro-batches, up to
3 iterations with different plans, 1 or 2 replicas. Our own rule plays all of them, the others the first of them. Exit
status 1 if ours deadlocks anywhere. 20,000 take about 20 minutes on one core.

Stock's own calls deadlock where all of this comes together: interleaved chunks without overlap_p2p_comm, as many
micro-batches as stages, and communicators that connect at their first use. A group of sends and receives then waits for
a connection whose other end is in the peer's next call, and the peer waits for its device (batch_p2p_sync) before that.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from markdown_table import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.device_model.cases import QUEUES, WAITS, Case, enough_blocks, random_case  # noqa: E402
from support.device_model.other_rules import RULES  # noqa: E402

OURS, STOCK = "by launch order", "stock Megatron"
Counts = Counter[tuple[str, str]]
"""By rule and kind of case."""


def kinds_of(case: Case) -> Iterator[str]:
    """The rows of the table that a case counts in."""
    device, job = case.device, case.job
    queues = "serial" if device.serial else f"{device.queues} queue{'s' * (device.queues > 1)}"
    yield f"{queues}, device-wide waits: {case.waits}"
    yield "connected at first use" if not device.connected else "connected at start"
    if device.launch_order:
        yield f"implicit launch order, by what has {device.launch_order}"
    if device.blocks is not None:
        yield "just enough room for all streams of NCCL"
    if job.replicas > 1:
        yield "two replicas"
    if job.sizes_vary:
        yield "sizes that vary"
    if len(job.iterations) > 1:
        yield "several iterations, each with another plan"
    if case.makes_communicators:
        yield "other threads make and abort communicators"
    if any(not iteration.training for iteration in job.iterations):
        yield "with evaluation"
    if any(iteration.planned_for is not None for iteration in job.iterations):
        yield "with a plan made for costs"
    yield "all"


def play(first: int, cases: int, others: int) -> tuple[Counts, Counts]:
    """Deadlocks and cases. Says on stderr what deadlocked that must not."""
    deadlocks, played = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    begun_s = time.monotonic()
    for number in range(cases):
        case = random_case(first + number)
        rules = [OURS, STOCK, *(rule for rule in RULES if rule != OURS)] if number < others else [OURS]
        for rule in rules:
            outcome = case.play_stock() if rule == STOCK else case.play(RULES[rule])
            for kind in kinds_of(case):
                played[rule, kind] += 1
                deadlocks[rule, kind] += outcome.deadlock is not None
            if outcome.deadlock is not None and rule == OURS:
                print(f"case {first + number}:\n{outcome.deadlock}", file=sys.stderr)
        if number % 500 == 499:
            gc.collect()
            print(f"{number + 1} cases, {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    return deadlocks, played


def table(deadlocks: Counts, played: Counts) -> str:
    """One row per kind of case, deadlocks of cases for each rule."""
    rules = [OURS, STOCK, *(rule for rule in RULES if rule != OURS)]
    queues = ["serial", *(f"{number} queue{'s' * (number > 1)}" for number in QUEUES)]
    rows = [f"{each}, device-wide waits: {waits}" for each in queues for waits in WAITS]
    rows += sorted({kind for _rule, kind in played} - {*rows, "all"})
    cells = [[row, *(f"{deadlocks[rule, row]} of {played[rule, row]}" for rule in rules)] for row in [*rows, "all"]]
    return markdown_table(["cases", *rules], cells)


def rooms(first: int, cases: int) -> str:
    """Deadlocks of our rule on 32 queues where there is less and less room. Each kernel of NCCL takes 2 blocks."""
    rows = []
    for kernels in range(enough_blocks(2, 2) // 2, 0, -1):
        found = 0
        for number in range(first, first + cases):
            case = random_case(number)
            limited = dataclasses.replace(
                case.device,
                queues=32,
                serial=False,
                blocks=2 * kernels + 1,
                blocks_per_transfer=2,
                blocks_per_collective=2,
            )
            found += dataclasses.replace(case, device=limited).play().deadlock is not None
        rows.append([f"for {kernels} kernels", f"{found} of {cases}"])
    return markdown_table(["blocks besides one of computation", "deadlocks"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--others", type=int, default=2_000, help="cases that the other rules play, too")
    parser.add_argument("--first", type=int, default=0, help="the first case: the same numbers are the same cases")
    parser.add_argument("--output", type=Path, default=None, help="also write the tables to this file")
    arguments = parser.parse_args()
    gc.freeze()
    deadlocks, played = play(arguments.first, arguments.cases, min(arguments.others, arguments.cases))
    text = "\n".join([table(deadlocks, played), "", rooms(arguments.first, max(1, arguments.cases // 100)), ""])
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    sys.exit(deadlocks[OURS, "all"] > 0)


if __name__ == "__main__":
    main()
