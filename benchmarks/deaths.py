# SPDX-License-Identifier: Apache-2.0
"""Throughput of a job whose cells have died: simulated, compared with published figures, and in real processes.

    python benchmarks/deaths.py [--draws 25] [--action-ms 60] [--output DIR]

Writes deaths.md and deaths.svg (which needs matplotlib). Simulated: dead cells at random places, no stage without a
live one; every action takes as long as every other. In real processes: a rank is killed in the middle of an iteration,
with compute emulated by sleeping. `--action-ms 0` leaves the processes out, and what deaths.md says of them as it is.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import RoutedPlan, plan_routed
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.trace import read_trace, trace_path
from testing.jobs.fault_tolerant_jobs import run_with_failures

RESULTS = Path(__file__).resolve().parent / "results"
REAL = "## In real processes"
REPLICAS, STAGES, MICRO_BATCHES = 4, 4, 16
CAP = 2 * STAGES + 2
"""Activations that a cell may hold."""
DEADLINE_S = 0.2
"""Time for each plan."""
RECYCLE = {1: 11.3, 2: 10.9, 3: 10.7, 4: 10.45, 5: 9.5, 6: 9.3, 8: 8.9, 9: 8.8}
RECYCLE_HEALTHY, RECYCLE_REPLICAS = 11.34, 6
"""Samples/s by dead GPUs of 24, read off the curve of ReCycle's talk (GPT-3 3.5B, DP 6, PP 4, A100s)."""
LLAMA_FAILURES, LLAMA_DAYS, LLAMA_GPUS = 419, 54, 16_384
"""Unexpected interruptions of Llama 3 405B's pre-training (The Llama 3 Herd of Models, section 3.3.4)."""
SAVE_S, RESTART_S = 30.0, 300.0
"""What a checkpoint stops a training for, and what it takes from a failure to the first new iteration: assumed."""
DIES_IN, ITERATIONS = 5, 16


def pipeline(micro_batches: int, action_s: float = 1.0, stages: int = STAGES) -> Costs:
    """Equal actions, within the cap."""
    return uniform_costs(
        stages,
        micro_batches,
        forward_s=action_s,
        backward_input_s=action_s,
        backward_weight_s=action_s,
        max_in_flight=CAP,
    )


def routed(replicas: int, micro_batches: int, dead: Sequence[Cell] = (), action_s: float = 1.0) -> RoutedPlan:
    """What live cells run."""
    costs = RoutedCosts(job=JobCosts(pipeline(micro_batches, action_s), replicas=replicas), dead=frozenset(dead))
    return plan_routed(costs, deadline_s=DEADLINE_S)


def stock_s(micro_batches: int) -> float:
    """1F1B without a fault, which is what ReCycle's and Oobleck's figures begin with."""
    return simulate(one_f_one_b(STAGES, micro_batches), pipeline(micro_batches)).makespan_s


def placements(replicas: int, count: int, draws: int) -> Iterator[list[Cell]]:
    """Random ones that leave each stage a live cell."""
    chosen, cells = random.Random(100 * replicas + count), [Cell(d, s) for d in range(replicas) for s in range(STAGES)]
    for _ in range(draws):
        while True:
            dead = chosen.sample(cells, count)
            if all(sum(cell.stage == stage for cell in dead) < replicas for stage in range(STAGES)):
                yield dead
                break


def dropped_share(replicas: int, micro_batches: int, dead: Sequence[Cell], healthy_s: float) -> float:
    """Throughput where replicas with a dead cell are dropped, and others take their micro-batches; 0: none is left."""
    left = replicas - len({cell.replica for cell in dead})
    return healthy_s / routed(1, math.ceil(replicas * micro_batches / left)).simulation.period_s if left else 0.0


@dataclass(frozen=True)
class Row:
    """Throughputs with so many dead cells, as shares of that without a fault, over all draws."""

    dead: int
    routed: list[float]
    of_bound: list[float]
    dropped: list[float]


def simulated(replicas: int, micro_batches: int, counts: Sequence[int], draws: int) -> list[Row]:
    """A row for each of `counts`, the number of dead cells."""
    healthy_s, rows = routed(replicas, micro_batches).simulation.period_s, []
    for count in counts:
        row = Row(count, [], [], [])
        for dead in placements(replicas, count, draws):
            plan = routed(replicas, micro_batches, dead)
            row.routed.append(healthy_s / plan.simulation.period_s)
            row.of_bound.append(plan.lower_bound.seconds / plan.simulation.period_s)
            row.dropped.append(dropped_share(replicas, micro_batches, dead, healthy_s))
        rows.append(row)
    return rows


def goodput(between_s: float) -> tuple[float, float]:
    """Young's and Daly's best interval between checkpoints, and the share of time that is left for training, where
    failures come `between_s` apart, each is restarted from and spare hosts are always there."""
    interval_s = math.sqrt(2.0 * SAVE_S * between_s)
    lost_s = interval_s / 2.0 + RESTART_S
    return interval_s, 1.0 - SAVE_S / interval_s - lost_s / between_s


def between_failures_s(gpus: int) -> float:
    """At Llama 3's rate."""
    return LLAMA_DAYS * 86400.0 / LLAMA_FAILURES * LLAMA_GPUS / gpus


def simulated_tables(rows: Sequence[Row]) -> list[str]:
    healthy_s, cells = routed(REPLICAS, MICRO_BATCHES).simulation.period_s, REPLICAS * STAGES
    of_stock = stock_s(MICRO_BATCHES) / healthy_s
    lines = [
        f"## Simulated: {REPLICAS} replicas x {STAGES} stages, {MICRO_BATCHES} micro-batches each",
        "",
        f"F = I = W, at most {CAP} activations per cell, stages synchronise together; medians (least) over "
        f"{len(rows[0].routed)} random places of the dead",
        "cells. Throughput as a share of that of our plan without a fault, which is zero-bubble; of 1F1B's, which",
        f"published systems compare with, shares are {of_stock:.2f} times these.",
        "",
        "| dead | live cells | routed | routed, of its proven bound | of 1F1B | pipelines dropped |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.dead} | {1 - row.dead / cells:.3f} | {median(row.routed):.3f} ({min(row.routed):.3f}) "
            f"| {median(row.of_bound):.3f} ({min(row.of_bound):.3f}) | {of_stock * median(row.routed):.3f} "
            f"| {median(row.dropped):.3f} ({min(row.dropped):.3f}) |"
        )
    return [*lines, ""]


def restart_table(one_dead: float, redo_s: float) -> list[str]:
    lines = [
        "## Compared with restarting from checkpoints",
        "",
        f"Failures come at Llama 3's rate: {LLAMA_FAILURES} in {LLAMA_DAYS} days on {LLAMA_GPUS:,} GPUs. Assumed: a "
        f"checkpoint stops training for {SAVE_S:g} s, a restart",
        f"takes {RESTART_S:g} s (which gives the 90% that Llama 3 reports as its effective training time at 16,384 "
        "GPUs), intervals are Young's and Daly's best",
        "ones, and spare hosts are there at once. Going on costs what is redone, then the speed that is missing "
        f"({1 - one_dead:.0%} with one dead cell",
        f"of {REPLICAS} x {STAGES}), and in the end a restart right after a checkpoint, which loses no work. So it is "
        "ahead of restarting at once if that",
        "comes within the time of the last column. Without spare hosts there is nothing to restart on but fewer "
        "pipelines.",
        "",
        "| GPUs | hours between failures | checkpoint every | goodput with restarts | lost by each failure: restart | "
        "going on, before speed | ahead for |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in (128, 1024, 4096, 16_384):
        between_s = between_failures_s(gpus)
        interval_s, share = goodput(between_s)
        lost_s, kept_s = interval_s / 2 + RESTART_S, redo_s + SAVE_S + RESTART_S
        lines.append(
            f"| {gpus:,} | {between_s / 3600:.1f} | {interval_s / 60:.0f} min | {share:.3f} | {lost_s / 60:.0f} min "
            f"| {kept_s / 60:.1f} min, of which {redo_s:.0f} s at once "
            f"| {(lost_s - kept_s) / (1 - one_dead) / 60:.0f} min |"
        )
    return [*lines, ""]


def recycle_table(draws: int) -> list[str]:
    counts = sorted(RECYCLE)
    lines = [
        "## Compared with ReCycle's published figures",
        "",
        f"{RECYCLE_REPLICAS} replicas x {STAGES} stages, as there; shares of the throughput without a fault. ReCycle: "
        f"{RECYCLE_HEALTHY} samples/s without a fault, others read off the",
        "curve of its talk (24 A100s, GPT-3 3.5B, 80 Gbit/s, measured; how many micro-batches is not known). Ours: "
        "simulated, compared with 1F1B without a",
        "fault, as theirs, and with our own plan without a fault. Random: medians over random places; even: dead "
        "cells evenly over stages, which",
        "ReCycle brings about by moving workers to other stages, and we do not. (Its averages over a trace of 24 to 15 "
        "GPUs: 10.8 samples/s, Oobleck 9.01.)",
        "",
        "| dead of 24 | live | ReCycle | 8 micro-batches, of 1F1B: random / even | of ours "
        "| 16 micro-batches, of 1F1B: random / even | of ours |",
        "|---|---|---|---|---|---|---|",
    ]
    columns: dict[int, list[str]] = {count: [] for count in counts}
    for micro_batches in (8, 16):
        stock, healthy_s = stock_s(micro_batches), routed(RECYCLE_REPLICAS, micro_batches).simulation.period_s
        for row in simulated(RECYCLE_REPLICAS, micro_batches, counts, draws):
            # One after another stage, and of each stage another replica's.
            even = [Cell((n + n // STAGES) % RECYCLE_REPLICAS, n % STAGES) for n in range(row.dead)]
            share, even_s = median(row.routed), routed(RECYCLE_REPLICAS, micro_batches, even).simulation.period_s
            columns[row.dead].append(f"{share * stock / healthy_s:.3f} / {stock / even_s:.3f}")
            columns[row.dead].append(f"{share:.3f} / {healthy_s / even_s:.3f}")
    for count, found in columns.items():
        live, theirs = 1 - count / (RECYCLE_REPLICAS * STAGES), RECYCLE[count] / RECYCLE_HEALTHY
        lines.append(f"| {count} | {live:.3f} | {theirs:.3f} | {' | '.join(found)} |")
    return [*lines, ""]


def train(action_ms: int, dead: Cell | None, directory: Path) -> tuple[list[float], str]:
    """Seconds of the forward_backward function by iteration, from the first rank's start to the last one's end, and the
    log of all ranks."""
    rank = None if dead is None else dead.stage * REPLICAS + dead.replica
    arguments = (
        f"--emulate-cpu --pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --hidden-size 32 --seq-length 16 "
        f"--mock-data --no-gradient-accumulation-fusion --global-batch-size {REPLICAS * MICRO_BATCHES} "
        f"--train-iters {ITERATIONS} --emulate-compute-ms {action_ms},{action_ms},{action_ms} --adaptra "
        f"--adaptra-host-transport shm --adaptra-max-in-flight {CAP} --adaptra-reroute failures "
        f"--dump-state {directory} --adaptra-trace-dir {directory / 'run'}"
    ).split()
    arguments += [] if rank is None else ["--emulate-death", f"{rank}:{DIES_IN}:7"]
    script = str(RESULTS.parents[1] / "scripts" / "train_gpt.py")
    results = run_with_failures(
        REPLICAS * STAGES, [script, *arguments], timeout_s=600, log_directory=directory / "logs"
    )
    wrong = [each.rank for each in results if each.returncode and each.rank != rank]
    assert not wrong, f"ranks {wrong} failed: {results[wrong[0]].output[-2000:]}"
    dumps = [torch.load(path, weights_only=True)["spans"] for path in sorted(directory.glob("rank*.pt"))]
    seconds = [max(e for _, e in each) - min(b for b, _ in each) for each in zip(*dumps, strict=True)]
    return seconds, "".join(each.output for each in results)


def where_it_goes(directory: Path, stage: int, iterations: range) -> tuple[float, float]:
    """Mean seconds that a live cell of `stage` computes, and then waits between its actions, in one iteration."""
    found = []
    for replica in range(REPLICAS):
        records = read_trace(trace_path(directory / "run", stage * REPLICAS + replica)).records
        for number in iterations:
            if mine := [record for record in records if record.iteration == number]:
                span_s = max(record.end_s for record in mine) - min(record.start_s for record in mine)
                computed_s = sum(record.compute_s for record in mine)
                found.append((computed_s, span_s - computed_s))
    computed_s, waited_s = (fmean(each) for each in zip(*found, strict=True))
    return computed_s, waited_s


def real_table(action_ms: int) -> list[str]:
    lines = [
        REAL,
        "",
        f"16 processes on {os.cpu_count()} cores, which all of them share: {REPLICAS} replicas x {STAGES} stages, "
        f"{MICRO_BATCHES} micro-batches, F = I = W = {action_ms} ms of emulated compute.",
        f"A rank of stage 1 is killed in iteration {DIES_IN}. Seconds of the forward_backward function, medians of the "
        f"last {ITERATIONS - DIES_IN - 2} of {ITERATIONS} iterations; bounds are of",
        "the emulated times alone, and contain none of the real work. The last columns: mean seconds of an iteration "
        "at the live cells of stage 1:",
        "their emulated times, how long actions really took, idle between actions, and before the first and after the "
        "last (filling, draining, gradients,",
        "commit).",
        "",
        "| | measured, s | bound, s | bound / measured | emulated | actions | idle between | before and after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    late = range(DIES_IN + 2, ITERATIONS)
    for name, dead in (("no fault", None), ("one cell dead", Cell(1, 1))):
        with tempfile.TemporaryDirectory() as place:
            seconds, log = train(action_ms, dead, Path(place))
            computed_s, waited_s = where_it_goes(Path(place), 1, late)
        measured_s = median(seconds[number] for number in late)
        plan = routed(REPLICAS, MICRO_BATCHES, [] if dead is None else [dead], action_ms / 1e3)
        bound_s, live = plan.lower_bound.seconds, REPLICAS - (dead is not None)
        emulated_s = 3 * action_ms / 1e3 * REPLICAS * MICRO_BATCHES / live
        lines.append(
            f"| {name} | {measured_s:.3f} | {bound_s:.3f} | {bound_s / measured_s:.3f} "
            f"| {emulated_s:.3f} | {computed_s:.3f} | {waited_s:.3f} | {measured_s - computed_s - waited_s:.3f} |"
        )
        for found in re.findall(r"run again ([0-9.]+) s after", log):
            lines[-1] += f"\n\nWhat was under way had been redone {found} s after the loss was seen."
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput over the number of dead cells."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    dead, cells = [0, *(row.dead for row in rows)], REPLICAS * STAGES
    routed_to = [1.0, *(median(row.routed) for row in rows)]
    axes.plot(dead, [1 - each / cells for each in dead], ":", color="#7b8494", label="share of live cells")
    axes.plot(dead, routed_to, "o-", color="#2f6fb3", label="micro-batches routed (band: all places)")
    axes.fill_between(
        dead, [1.0, *(min(r.routed) for r in rows)], [1.0, *(max(r.routed) for r in rows)], color="#2f6fb3", alpha=0.15
    )
    axes.plot(dead, [1.0, *(median(r.dropped) for r in rows)], "s-", color="#a3162e", label="pipelines dropped")
    for gpus, style in ((128, "--"), (LLAMA_GPUS, "-.")):
        share = goodput(between_failures_s(gpus))[1]
        label = f"restarts, spares always at hand, {gpus:,} GPUs"
        axes.axhline(share, linestyle=style, color="#1c2128", linewidth=1, label=label)
    axes.set(xlabel=f"dead cells of {cells}", ylabel="throughput, of that without a fault", ylim=(0.0, 1.03))
    axes.legend(frameon=False, fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=25, help="random places of dead cells")
    parser.add_argument("--action-ms", type=int, default=60, help="of each F, I and W in real processes; 0: none")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # The server of the job's store, in this process, looks each client's name up while all others wait.
    os.environ["RES_OPTIONS"] = "attempts:0"
    page = arguments.output / "deaths.md"
    if arguments.action_ms:
        real = real_table(arguments.action_ms)
    else:
        real = [REAL + page.read_text().partition(REAL)[2].rstrip()]
    (redo_s,) = re.findall(r"run again ([0-9.]+) s after", "".join(real))
    rows = simulated(REPLICAS, MICRO_BATCHES, (1, 2, 4, 8), arguments.draws)
    lines = [
        "# Throughput when cells have died",
        "",
        "Written by `python benchmarks/deaths.py`.",
        "",
        "![Throughput over the number of dead cells](deaths.svg)",
        "",
        *simulated_tables(rows),
        *recycle_table(arguments.draws),
        *restart_table(median(rows[0].routed), float(redo_s)),
        *real,
    ]
    page.write_text("\n".join(lines).rstrip() + "\n")
    draw(rows, arguments.output / "deaths.svg")
    print(page.read_text())


if __name__ == "__main__":
    main()
