# SPDX-License-Identifier: Apache-2.0
"""The trainings of sync_modes.py in one process and in virtual time, from several seeds.

    python benchmarks/sync_modes_virtual.py [--iterations 56] [--seeds 4]

Gradients of 8 replicas are computed one after another, by Megatron's model, data and optimizer; which of them make an
update, and in which mode, is decided by the code that decides in a job. A clock counts the time that they would take;
what is sent takes none. Writes benchmarks/results/sync_modes_virtual.md.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from sync_modes import EVALUATED, REPLICAS, SLOWDOWN, STALENESS, STRAGGLER, arguments, iterations_of, seconds_to

from adaptra_megatron.gradsync.mode_decider import Gradient, ModeDecider
from adaptra_megatron.gradsync.update_order import CatchUp, Updates
from testing.megatron.megatron_on_cpu import install

install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from adaptra_megatron.megatron.replica_updates import KINDS  # noqa: E402
from testing.training.data import build_datasets, micro_batches  # noqa: E402
from testing.training.process_groups import set_up_groups  # noqa: E402
from testing.training.train import Trainer  # noqa: E402
from testing.training.training_arguments import check_arguments, parse_arguments  # noqa: E402

RESULT = Path(__file__).with_name("results") / "sync_modes_virtual.md"
STOPPED, PERIOD_S, COPY_EVERY = 0.8, float(SLOWDOWN), 2
Tensors = list[torch.Tensor]
Ends = Callable[[int, float], float]
"""When a replica that begins a gradient at a time has it. Alike ones differ by what no two computers have equal."""


def slow(replica: int, begun_s: float) -> float:
    """One takes three times as long."""
    return begun_s + (SLOWDOWN * 1.02 if replica == STRAGGLER else 1 + 0.001 * replica)


def stopped(replica: int, begun_s: float) -> float:
    """One is stopped for 0.8 of each 3 s; the time that it sleeps, in place of computing, goes on meanwhile."""
    end_s = begun_s + 1 + 0.001 * replica
    phase_s = end_s % PERIOD_S
    return end_s if replica != STRAGGLER or phase_s >= STOPPED * PERIOD_S else end_s - phase_s + STOPPED * PERIOD_S


def alike(replica: int, begun_s: float) -> float:
    """None is late."""
    return begun_s + 1 + 0.001 * replica


STRAGGLERS: dict[str, Ends] = {f"takes {SLOWDOWN} times as long": slow, "is stopped by turns": stopped, "none": alike}


class Replicas:
    """One model, on which the gradients of all replicas are computed, and one optimizer."""

    def __init__(self, corpus: Path, iterations: int, seed: int) -> None:
        text = [*arguments("none", "ssgd", corpus, iterations, 1), "--seed", str(seed)]
        args = parse_arguments([each for each in text if each not in ("--emulate-compute-ms", "1,0,0")])
        datasets = build_datasets(args)
        args.global_batch_size = args.micro_batch_size
        check_arguments(args, 1)
        set_up_groups(args)
        self._trainer, self._increment = Trainer(args), args.micro_batch_size
        sizes = {"micro_batch_size": args.micro_batch_size, "data_parallel_size": REPLICAS, "consumed_samples": 0}
        device = torch.cuda.current_device()
        self._batches = [
            micro_batches(datasets[0], data_parallel_rank=replica, device=device, **sizes)
            for replica in range(REPLICAS)
        ]
        self._validation = lambda: micro_batches(datasets[1], data_parallel_rank=0, device=device, **sizes)
        self._parameters = [each for chunk in self._trainer.model for each in chunk.parameters()]
        self._buffers = [each for chunk in self._trainer.model for each in chunk.buffers]

    def get(self) -> Tensors:
        """A copy of the parameters."""
        return [each.detach().clone() for each in self._parameters]

    def _put(self, values: Tensors) -> None:
        with torch.no_grad():
            for each, value in zip(self._parameters, values, strict=True):
                each.copy_(value)

    def gradient(self, replica: int, parameters: Tensors) -> Tensors:
        """A replica's next one."""
        self._put(parameters)
        for chunk in self._trainer.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self._trainer.optimizer.zero_grad()
        self._trainer._forward_backward(self._batches[replica], forward_only=False)
        return [each.grad_data.clone() for each in self._buffers]

    def step(self, parameters: Tensors, gradient: Tensors, share: float) -> Tensors:
        """Parameters after an update by the mean of its gradients, its share of all."""
        self._put(parameters)
        for buffer, value in zip(self._buffers, gradient, strict=True):
            buffer.grad_data.copy_(value)
        optimizer = self._trainer.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= share
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._trainer.scheduler.step(increment=self._increment)
        return self.get()

    def loss(self, parameters: Tensors) -> float:
        """Validation loss."""
        self._put(parameters)
        for chunk in self._trainer.model:
            chunk.eval()
        iterator = self._validation()
        with torch.no_grad():
            found = [
                self._trainer._forward_backward(iterator, forward_only=True)[0]["lm loss"] for _ in range(EVALUATED)
            ]
        return float(fmean(float(each[0] / each[1]) for each in found))


def square(gradient: Tensors) -> float:
    """Squared norm."""
    return float(sum(each.double().square().sum() for each in gradient))


def mean(gradients: list[Tensors]) -> Tensors:
    """That of an update."""
    return [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]


def train(ends: Ends, mode: str, corpus: Path, updates: int, seed: int) -> list[list[float]]:
    """Validation losses of a training, as [seconds, update, loss]."""
    replicas, state = Replicas(corpus, updates, seed), Updates(REPLICAS, STALENESS)
    decider = ModeDecider(REPLICAS, KINDS.get(mode, ()), STALENESS)
    now, whole_square = replicas.get(), None
    read, gradients, given = [now] * REPLICAS, [now] * REPLICAS, dict[int, list[Tensors]]()
    computing = [(ends(each, 0.0), each, 0.0) for each in range(REPLICAS)]
    heapq.heapify(computing)
    copies = [(0.0, 0, now)]

    def begins(replica: int, at_s: float) -> None:
        read[replica] = now
        heapq.heappush(computing, (ends(replica, at_s), replica, at_s))

    while state.version < updates:
        at_s, replica, begun_s = heapq.heappop(computing)
        gradients[replica] = replicas.gradient(replica, read[replica])
        decider.arrived(replica, Gradient(at_s - begun_s, square(gradients[replica]), whole_square))
        whole_square = None
        for event in state.arrives(replica):
            assert isinstance(event, CatchUp)
            ((parent, late),) = event.handovers
            given.setdefault(parent, []).extend([gradients[late], *given.pop(late, ())])
            begins(late, at_s)
        while state.version < updates and (update := state.next_update()) is not None:
            parts = [gradients[each] for each in update.members]
            parts += [each for member in update.members for each in given.pop(member, ())]
            total = mean(parts)
            whole_square = square(total) if update.together else None
            now = replicas.step(now, total, update.gradients / REPLICAS)
            if state.version % COPY_EVERY == 0 or state.version == updates:
                copies.append((at_s, state.version, now))
            state.begins(update.begins)
            for each in update.members:
                begins(each, at_s)
            if (chosen := decider.decide(update)) is not None:
                state.mode = chosen.mode
    return [[at_s, number, replicas.loss(parameters)] for at_s, number, parameters in copies]


def main() -> None:
    """Run all, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=56)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from testing.training.corpus import write_corpus

    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory) / "corpus"
        write_corpus(corpus)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows = [each for straggler in STRAGGLERS for each in rows_of(straggler, corpus, options)]
        dist.destroy_process_group()
    options.output.write_text(page(rows, options))


def rows_of(straggler: str, corpus: Path, options: argparse.Namespace) -> list[str]:
    """Rows of the table: each mode against synchronous training from the same seeds."""
    ends, seeds = STRAGGLERS[straggler], range(1234, 1234 + options.seeds)
    stock = {seed: train(ends, "ssgd", corpus, options.iterations, seed) for seed in seeds}
    rows = []
    for mode in ("auto",) if straggler == "none" else ("x-order", "dynamic", "auto"):
        updates = iterations_of(mode, straggler, options.iterations)
        saved, off = [], []
        for seed in seeds:
            ours = train(ends, mode, corpus, updates, seed)
            target = stock[seed][3 * (len(stock[seed]) - 1) // 4][2]
            off.append(ours[-1][2] / stock[seed][-1][2] - 1)
            saved.append(1 - seconds_to(ours, target) / seconds_to(stock[seed], target))
            print(straggler, mode, seed, ours[-1], stock[seed][-1], saved[-1], file=sys.stderr, flush=True)
        rows.append(f"| {straggler} | {mode} | {described(saved, off)} | {updates} |")
    return rows


def described(saved: list[float], off: list[float]) -> str:
    """Cells of a row: time saved up to the loss, where it is reached, and how far off the final loss is."""
    reached = [each for each in saved if each > -math.inf]
    span = f"{fmean(reached):.0%} ({min(reached):.0%} to {max(reached):.0%})" if reached else "-"
    return f"{len(reached)} of {len(saved)} | {span} | {fmean(off):+.2%} ({min(off):+.2%} to {max(off):+.2%})"


def page(rows: list[str], options: argparse.Namespace) -> str:
    """All of it."""
    lines = [
        "# Synchronisation modes, in virtual time",
        "",
        "Written by `python benchmarks/sync_modes_virtual.py`.",
        "",
        f"As in [sync_modes.md](sync_modes.md), in one process: {REPLICAS} replicas of a small GPT, with Adam, a "
        f"gradient of 1 s, {options.iterations} updates of all, or so many of some that there are as many gradients. "
        f"Means over {options.seeds} seeds, and extremes; each against synchronous training (ssgd) from the same seed, "
        "whose validation loss after three quarters of its updates is to be reached. What is sent takes no time. The "
        "losses of ssgd from the first seed are those of the processes of sync_modes.md, to 7 digits.",
        "",
        "| straggler | mode | loss reached | less time than ssgd | final loss off ssgd's | updates |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
