# SPDX-License-Identifier: Apache-2.0
"""Ranks die at random moments of trainings: what the others come to, compared with the training without deaths.

    python -m campaigns.deaths [--runs 300] [--seed 1] [--output build/deaths]

Each run trains a small GPT in one of several layouts while one to three ranks kill themselves, whatever they do at that
moment: actions, messages, collectives, commits, optimizer steps, meetings after the death before. Where all of the
model and of its optimizer lives, the rest must come to the same losses and parameters up to rounding, equal on all
replicas to the bit; else all must end, and say why. Exit status: 0 if everything held, 1 if not.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.launch import LaunchError, RankResult
from adaptra_megatron.emulation.jobs.outlived import run_outlived
from adaptra_megatron.emulation.results import ResultsDifferError, fingerprint, relative_distances

TRAIN_GPT = str(Path(__file__).parents[1] / "scripts/train_gpt.py")
ITERATIONS, MICRO_BATCHES = 8, 4
FIRST_DEATH, LAST_DEATH = 1, 5
"""Iterations. While links are set up, in the first, no rank is outlived."""
LONGEST_S, ITERATION_MS = 60.0, 300
WITHIN = {"losses": 1e-6, "grad norms": 1e-5, "parameters": 1e-5}
"""Largest distances from the training without deaths, as shares of the whole."""
LOST_LOSSES = 0.05
"""Share of a mean loss by which the losses of some micro-batches may change it."""
KILLED = -9
BACK = "has the state of the job"
"""What a rank logs that has been started again, in time to go on with the others."""


@dataclass(frozen=True)
class Layout:
    """Cells and features of one training."""

    replicas: int
    stages: int
    tensor: int = 1
    flags: str = ""
    adaptra: str = "--adaptra --adaptra-reroute failures --adaptra-host-transport shm"

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages * self.tensor

    def cell(self, rank: int) -> tuple[int, int]:
        """Replica and stage of a rank, in Megatron's order: tensor lanes innermost, then replicas, then stages."""
        return rank // self.tensor % self.replicas, rank // (self.tensor * self.replicas)

    def is_lost(self, dead: Collection[tuple[int, int]]) -> bool:
        """Return whether something of the model is on no cell but `dead` ones: all of a stage, or a shard of the
        optimizer's state, of which the next replica has a copy."""
        sharded = "--use-distributed-optimizer" in self.flags
        others = range(1, 2 if sharded else self.replicas)
        return any(
            (each, stage) in dead and all(((each + other) % self.replicas, stage) in dead for other in others)
            for each in range(self.replicas)
            for stage in range(self.stages)
        )

    def arguments(self, directory: Path, deaths: Sequence[str]) -> list[str]:
        """Of scripts/train_gpt.py. `deaths`: see --emulate-death."""
        dying = [word for death in deaths for word in ("--emulate-death", death)]
        layout = (
            f"--emulate-cpu --pipeline-model-parallel-size {self.stages} --tensor-model-parallel-size {self.tensor} "
            f"--num-layers {self.stages} --mock-data --no-gradient-accumulation-fusion --hidden-size 32 "
            f"--seq-length 16 --global-batch-size {MICRO_BATCHES * self.replicas} --train-iters {ITERATIONS} "
            f"--eval-iters 1 --eval-interval 4 --dump-state {directory} {self.adaptra} {self.flags}"
        )
        return [*layout.split(), *dying]


LAYOUTS = (
    Layout(3, 2),
    Layout(2, 4, flags="--overlap-grad-reduce"),
    Layout(2, 2, tensor=2, flags="--sequence-parallel"),
    Layout(3, 2, flags="--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    Layout(4, 2, flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    Layout(3, 2, flags="--calculate-per-token-loss --mock-data-padded --hidden-dropout 0.1 --attention-dropout 0.1"),
)


def train(
    layout: Layout,
    directory: Path,
    server: ForkServer,
    deaths: Sequence[str] = (),
    *,
    back: Sequence[int] = (),
    script: Sequence[str] = (TRAIN_GPT,),
) -> list[RankResult]:
    """One training by a `script`. `back`: iterations that wait until all ranks that have died have been started again;
    without any no rank is. Raises LaunchError for a training that hangs."""
    waits = (word for iteration in back for word in ("--emulate-wait-for-arrivals", str(iteration)))
    argv = [*script, *layout.arguments(directory, deaths), *waits]
    logs = directory / "logs"
    return run_outlived(
        layout.world_size, argv, timeout_s=LONGEST_S, server=server, log_directory=logs, restarts=len(back)
    )


def problems(layout: Layout, peace: Path, directory: Path, results: Sequence[RankResult]) -> list[str]:
    """What is wrong with a training whose ranks died, beside that in `peace`; empty where all is as it should be."""
    dead = {layout.cell(result.rank) for result in results if result.returncode == KILLED}
    back = {result.rank for result in results if BACK in result.output}
    rest = [result for result in results if layout.cell(result.rank) not in dead]
    if layout.is_lost(dead):
        silent = [each.rank for each in rest if "restart from the last checkpoint" not in each.output]
        return [f"rank {rank} does not say that something is lost" for rank in silent]
    found = [f"rank {each.rank} exits with {each.returncode}" for each in rest if each.returncode]
    if found:
        return found
    prints: dict[tuple[int, int], set[str]] = {}
    # One that dies between the commit and the sum of losses takes those of its micro-batches with it, into no log.
    lost = sum(stage == layout.stages - 1 for _, stage in {*dead, *map(layout.cell, back)})
    for rank in (each.rank for each in rest):
        tensors, expected = dumped(directory, rank), dumped(peace, rank)
        if rank in back:
            expected = last(expected, tensors)
        stage, lane = layout.cell(rank)[1], rank % layout.tensor
        parameters = {name: value for name, value in tensors.items() if name.startswith("parameter ")}
        prints.setdefault((stage, lane), set()).add(fingerprint(parameters))
        odd = [name for name in ("losses", "evaluation losses") if _differing(expected[name], tensors[name]) > lost]
        try:
            distances = relative_distances(_without_losses(expected), _without_losses(tensors))
        except ResultsDifferError as cause:
            found.append(f"rank {rank}: {cause}")
            continue
        far = [f"{each} differ by {share:.2e}" for each, share in distances.items() if share > WITHIN[each]]
        found += [f"rank {rank}: {each}" for each in (*far, *(f"too many {name} differ" for name in odd))]
    return found + [f"replicas of stage {stage} differ" for (stage, _), each in prints.items() if len(each) > 1]


def dumped(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    """What a rank has come to, without what it reports for others: the losses of single micro-batches."""
    found: dict[str, torch.Tensor] = torch.load(directory / f"rank{rank}.pt", weights_only=True)["tensors"]
    return {name: tensor for name, tensor in found.items() if "micro-batch" not in name}


def _differing(expected: torch.Tensor, found: torch.Tensor) -> int:
    """Number of losses that are not what they should be; all where one is far from it."""
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=LOST_LOSSES, atol=0.0):
        return max(1, expected.numel())
    return int((~torch.isclose(expected, found, rtol=WITHIN["losses"], atol=0.0)).sum())


def last(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is expected of a rank that has been started again, and reports of the last iterations alone."""
    series = {name for name in expected if "losses" in name or "grad norms" in name}
    return {name: each[-len(found[name]) :] if name in series else each for name, each in expected.items()}


def _without_losses(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "losses" not in name}


def pauses_s(results: Sequence[RankResult]) -> list[float]:
    """Seconds from each death that was seen to the commit of what was redone."""
    texts = (result.output for result in results if result.returncode == 0)
    return [float(found) for text in texts for found in re.findall(r"redone ([0-9.]+) s after", text)]


def random_deaths(layout: Layout, chosen: random.Random) -> list[str]:
    """One to three, at any moment of the first iterations."""
    ranks = chosen.sample(range(layout.world_size), chosen.choice((1, 1, 2, 3)))
    return [f"{rank}:{chosen.randint(FIRST_DEATH, LAST_DEATH)}:+{chosen.randint(0, ITERATION_MS)}" for rank in ranks]


def campaign(runs: int, seed: int, directory: Path, server: ForkServer, say: Callable[[str], object]) -> list[str]:
    """Run it; all problems, each with the run that it is of, whose logs are kept."""
    chosen, found, times, died = random.Random(seed), list[str](), list[float](), 0
    for number, layout in enumerate(LAYOUTS):
        results = train(layout, directory / f"peace{number}", server)
        assert not any(result.returncode for result in results), f"{layout} fails without deaths"
    for run in range(runs):
        number = run % len(LAYOUTS)
        place, deaths = directory / f"run{run}", random_deaths(LAYOUTS[number], chosen)
        try:
            results = train(LAYOUTS[number], place, server, deaths)
        except LaunchError as hung:
            wrong, results = [str(hung).splitlines()[0]], hung.results
        else:
            wrong = problems(LAYOUTS[number], directory / f"peace{number}", place, results)
        died += sum(result.returncode == KILLED for result in results)
        times += pauses_s(results)
        found += [f"run {run}, {LAYOUTS[number]}, deaths {deaths}: {each}" for each in wrong]
        say(f"run {run}: {' '.join(deaths)}: {wrong or 'as without deaths'}")
        if not wrong:
            shutil.rmtree(place)
    if times:
        say(f"{runs} runs, {died} deaths; redone after {median(times):.2f} s (median), {max(times):.2f} s at most")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.deaths", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/deaths"))
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.output, ignore_errors=True)
    with ForkServer() as server:
        found = campaign(
            arguments.runs, arguments.seed, arguments.output, server, lambda line: sys.stdout.write(f"{line}\n")
        )
    sys.stdout.write("".join(f"{problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
