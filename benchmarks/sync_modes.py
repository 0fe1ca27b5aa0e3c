# SPDX-License-Identifier: Apache-2.0
"""What synchronisation modes bring: time to a validation loss of a small GPT on 8 replicas, one of them a straggler.

    python benchmarks/sync_modes.py [--iterations 56] [--compute-ms 850] [--runs 3]

Real processes and numbers; what computation lasts is emulated, by sleeping. One replica takes three times as long, or
is stopped and continued (SIGSTOP, SIGCONT) by turns, 80% of each three gradients' time; then none is late. Also, in
simulated time, the learning rate of updates by some of the replicas: by the sum of their gradients over all replicas,
and by their mean.
Writes benchmarks/results/sync_modes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from adaptra_megatron.gradsync.sync_modes import Mode, ModeKind, choose
from adaptra_megatron.gradsync.update_order import Update
from adaptra_megatron.tools.local_ranks.launch_ranks import BRIEF_LOOKUPS, run_ranks
from testing.jobs.fork_server import ForkServer
from testing.update_simulation import updates_of

REPLICAS, STRAGGLER, SLOWDOWN, STALENESS = 8, 7, 3, 4
LIMIT_S = 1500.0
SNAPSHOT_EVERY, EVALUATED = 4, 8
"""Iterations between copies of parameters, and batches with which each is evaluated afterwards."""
FIRST = 1
"""Times count from its beginning: in the one before, groups and links are set up."""
RESULT = Path(__file__).with_name("results") / "sync_modes.md"
MODES = {"ssgd": "", **{mode: f"--adaptra --adaptra-sync-mode {mode}" for mode in ("x-order", "dynamic", "auto")}}
STRAGGLERS = {
    f"takes {SLOWDOWN} times as long": ("ssgd", "x-order", "dynamic"),
    "is stopped by turns": ("ssgd", "auto"),
    "none": ("ssgd", "auto"),
}
_STOP_BY_TURNS = """
import os, signal, sys, time
victim, stopped_s, running_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while os.getppid() == victim:
    os.kill(victim, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(victim, signal.SIGCONT)
    time.sleep(running_s)
"""


def iterations_of(mode: str, straggler: str, iterations: int) -> int:
    """Updates of a mode with as many gradients as synchronous training has in so many, by the model."""
    if mode == "ssgd" or straggler == "none":
        return iterations
    kinds = {"x-order": (ModeKind.X_ORDER,), "dynamic": (ModeKind.DYNAMIC,), "auto": tuple(ModeKind)}[mode]
    times_s = [1.0] * REPLICAS
    times_s[STRAGGLER] = 1.03 * SLOWDOWN  # as it never comes at the same time as the others
    return round(iterations * REPLICAS / choose(times_s, kinds, STALENESS).pace.gradients)


def arguments(straggler: str, mode: str, corpus: Path, iterations: int, compute_ms: int) -> list[str]:
    """Those of one training."""
    slow = f"--emulate-slow-cell {STRAGGLER}.0:{SLOWDOWN}" if straggler.startswith("takes") else ""
    return (
        f"--emulate-cpu --distributed-backend gloo --data-path {corpus} --data-cache-path {corpus.parent} "
        f"--no-gradient-accumulation-fusion --num-layers 2 --hidden-size 32 --seq-length 32 --micro-batch-size 4 "
        f"--global-batch-size {4 * REPLICAS} --train-iters {iterations} --lr 3e-3 --lr-decay-style cosine "
        f"--lr-warmup-iters 10 --log-interval 1000 --emulate-compute-ms {compute_ms},0,0 --eval-iters 1 "
        f"--eval-interval 1000000 {slow} {MODES[mode]}"
    ).split()


@contextmanager
def stopped_by_turns(seconds: float) -> Iterator[None]:
    """Stop this process for most of each stretch of as many seconds."""
    command = [sys.executable, "-c", _STOP_BY_TURNS, str(os.getpid()), str(0.8 * seconds), str(0.2 * seconds)]
    with subprocess.Popen(command) as stopper:
        try:
            yield
        finally:
            stopper.kill()


def rank(output: Path, stopped_s: float, argv: list[str]) -> None:
    """One rank of a training; the first writes times and validation losses."""
    from testing.megatron.megatron_on_cpu import install

    install()
    import torch
    import torch.distributed as dist
    from adaptra_megatron.patches import enable

    from adaptra_megatron.config import config_from_arguments
    from testing.training.conditions import emulate_conditions
    from testing.training.process_groups import join_job, leave_job, set_up_groups
    from testing.training.train import Trainer
    from testing.training.training_arguments import check_arguments, parse_arguments

    torch.set_num_threads(1)
    args = parse_arguments(argv)
    check_arguments(args, join_job(args))
    set_up_groups(args)
    first, copies = dist.get_rank() == 0, []

    def copy(iteration: int) -> None:
        if first and (iteration == FIRST or iteration and iteration % SNAPSHOT_EVERY == 0):
            copies.append((time.monotonic(), iteration, [each.detach().clone() for each in parameters()]))

    def parameters() -> Iterator[Any]:
        return (each for chunk in trainer.model for each in chunk.parameters())

    applied = None
    with emulate_conditions(args, REPLICAS) as conditions:
        if args.adaptra:
            applied = enable(config_from_arguments(args), decorate=conditions.decorate)
        trainer = Trainer(args, [*conditions.watchers, copy], None if applied is None else applied.runtime)
        dist.barrier()
        with stopped_by_turns(stopped_s) if stopped_s and dist.get_rank() == STRAGGLER else memoryless():
            trainer.run()
    copy(args.train_iters)
    updates = {} if applied is None else applied.runtime.summary().get("updates", {})
    if applied is not None:
        applied.undo()
    if first:
        losses = [(at_s - copies[0][0], number, _loss(trainer, parameters, saved)) for at_s, number, saved in copies]
        output.write_text(json.dumps({"losses": losses, "updates": updates}))
    dist.barrier()
    leave_job()


@contextmanager
def memoryless() -> Iterator[None]:
    """Do nothing."""
    yield


def _loss(trainer: Any, parameters: Callable[[], Iterator[Any]], saved: list[Any]) -> float:
    """Validation loss of a copy of the parameters."""
    import torch

    with torch.no_grad():
        for each, value in zip(parameters(), saved, strict=True):
            each.copy_(value)
        iterator = trainer._iterators(trainer.validation_data, 0)
        found = [trainer._forward_backward(iterator, forward_only=True)[0]["lm loss"] for _ in range(EVALUATED)]
    return float(fmean(float(each[0] / each[1]) for each in found))


def train(straggler: str, mode: str, corpus: Path, options: argparse.Namespace, server: ForkServer) -> dict[str, Any]:
    """One training; its validation losses as [seconds, iteration, loss], and what its first rank counted."""
    stopped_s = SLOWDOWN * options.compute_ms / 1e3 if straggler.startswith("is stopped") else 0.0
    updates = iterations_of(mode, straggler, options.iterations)
    given = arguments(straggler, mode, corpus, updates, options.compute_ms)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        run_ranks(
            REPLICAS,
            [__file__, "rank", str(output), str(stopped_s), *given],
            timeout_s=LIMIT_S,
            server=server,
            log_directory=directory,
            env={**BRIEF_LOOKUPS, "OMP_NUM_THREADS": "1"},
        )
        found: dict[str, Any] = json.loads(output.read_text())
        print(straggler, mode, found["updates"], found["losses"][-1], file=sys.stderr, flush=True)
        return found


def seconds_to(losses: list[list[float]], target: float) -> float:
    """When the validation loss is first at `target`, between copies along a line; infinite where it never is."""
    before = losses[0]
    for each in losses:
        if each[2] <= target:
            share = 0.0 if each is before else (before[2] - target) / (before[2] - each[2])
            return before[0] + share * (each[0] - before[0])
        before = each
    return float("inf")


def rate_rule(by_mean: bool) -> str:
    """Loss of a noisy quadratic of 40 dimensions after 4,000 single gradients of 8 replicas, one of them slow."""
    random, curvature = np.random.default_rng(1), np.linspace(0.2, 1.0, 40)
    here = random.normal(size=40) * 3
    read = [here] * REPLICAS
    times_s = [0.1] * (REPLICAS - 1) + [0.3]
    made = updates_of(REPLICAS, Mode.x_order(REPLICAS, 1), 8, lambda replica, _: times_s[replica] + replica * 1e-3)
    for _, (_at_s, update) in zip(range(4000), made, strict=False):
        assert isinstance(update, Update), "gradients of small updates are not given to others"
        total = sum(curvature * read[each] + random.normal(size=40) / 2 for each in update.members)
        here = here - total / (len(update.members) if by_mean else REPLICAS)
        for each in update.members:
            read[each] = here
    size = float(np.abs(here).max())
    return f"{float(curvature @ (here * here) / 2):.3g}" if size < 1e3 else "diverges"


def _seconds_per_update(losses: list[list[float]]) -> float:
    (begun_s, first, _), (total_s, updates, _) = losses[1], losses[-1]
    return (total_s - begun_s) / (updates - first)


def _spread(values: list[str]) -> str:
    """The median of values as they are written down, and extremes where there are several; "never" is infinite."""
    ordered = sorted(values, key=lambda value: float(value.rstrip(" s%")))
    middle = ordered[(len(ordered) - 1) // 2]
    return middle if len(values) == 1 else f"{middle} ({ordered[0]} to {ordered[-1]})"


def report(found: dict[tuple[str, str], list[dict[str, Any]]], options: argparse.Namespace) -> str:
    """The page."""
    lines = [
        "# Synchronisation modes",
        "",
        "Written by `python benchmarks/sync_modes.py`.",
        "",
        f"{REPLICAS} replicas of a small GPT on the demo's corpus, a gradient of {options.compute_ms} ms, "
        f"{options.iterations} updates of all replicas, or so many of some that there are as many gradients; a cosine "
        f"schedule; processes on a machine with {os.cpu_count()} cores; medians of {options.runs} runs, and extremes. "
        "The time is from the end of the first iteration, in which groups and links are set up, until the validation "
        "loss that synchronous training (ssgd, one run) has after three quarters of its updates. Stopped by turns: for "
        "80% of each three gradients' time, in which its emulated computation goes on, so that "
        "it also takes up to three times as long, and does not answer most of the time.",
        "",
        "| straggler | mode | time to loss | less than ssgd | seconds per update | final loss, off ssgd's | updates |",
        "|---|---|---|---|---|---|---|",
    ]
    for (straggler, mode), runs in found.items():
        baseline = found.get((straggler, "ssgd"), runs)[0]["losses"]
        target = baseline[3 * (len(baseline) - 1) // 4][2]
        stock_s, final = seconds_to(baseline, target), baseline[-1][2]
        taken_s = [seconds_to(each["losses"], target) for each in runs]
        columns = (
            [f"{each:.0f} s" for each in taken_s],
            [f"{1 - each / stock_s:.0%}" for each in taken_s],
            [f"{_seconds_per_update(each['losses']):.3f}" for each in runs],
            [f"{each['losses'][-1][2] / final - 1:+.2%}" for each in runs],
        )
        updates = ", ".join(f"{count} {name}" for name, count in sorted(runs[0]["updates"].items())) or "-"
        lines.append(f"| {' | '.join((straggler, mode, *map(_spread, columns), updates))} |")
    lines += [
        "",
        "Updates are counted on the first replica, which is fast. Learning rate, in simulated time: a noisy quadratic, "
        "updates of single gradients, one replica three times as slow. By the sum over the number of replicas, the "
        f"loss after 4,000 of them: {rate_rule(by_mean=False)}. By the mean of an update's gradients: "
        f"{rate_rule(by_mean=True)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all trainings, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=56)
    parser.add_argument("--compute-ms", type=int, default=850)
    parser.add_argument("--runs", type=int, default=3, help="of modes other than ssgd, where there is a straggler")
    parser.add_argument("--only", default="", help="straggler/mode pairs with this in their name")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    from testing.megatron.megatron_on_cpu import install

    install()
    from testing.training.corpus import write_corpus

    with tempfile.TemporaryDirectory() as directory, ForkServer() as server:
        corpus = Path(directory) / "corpus"
        write_corpus(corpus)
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for straggler, modes in STRAGGLERS.items():
            for mode in (mode for mode in modes if options.only in f"{straggler}/{mode}"):
                for _ in range(1 if mode == "ssgd" or straggler == "none" else options.runs):
                    found.setdefault((straggler, mode), []).append(train(straggler, mode, corpus, options, server))
                    options.output.write_text(report(found, options))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        main()
