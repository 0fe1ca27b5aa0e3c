# SPDX-License-Identifier: Apache-2.0
"""Ranks die at random moments of trainings: what the others come to, compared with the training without deaths.

    python -m campaigns.deaths [--runs 300 | --seconds 3600] [--seed 1] [--output build/deaths] [--again]

Each run trains a small GPT in one of several layouts while one to three ranks kill themselves, whatever they do at that
moment: actions, messages, collectives, commits, optimizer steps, meetings after the death before. Where all of the
model and of its optimizer lives, the rest must come to the same losses and parameters up to rounding, equal on all
replicas to the bit; else all must end, and say why.

In half of the runs ranks that have died are started again, and from a random iteration on each waits until all stand
ready. Ranks die again there, and as others are admitted: newcomers, those that admit them, the one that sends the
state. In the end all are in place, but for those that died in the last iterations, with the same numbers. No run may
leave a process behind. Exit status: 0 if everything held, 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from adaptra_megatron.emulation.faults.deaths import POINTS
from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.launch import LaunchError, RankResult
from adaptra_megatron.emulation.jobs.outlived import Host, run_outlived
from adaptra_megatron.emulation.results import ResultsDifferError, fingerprint, relative_distances

TRAIN_GPT = str(Path(__file__).parents[1] / "scripts/train_gpt.py")
ITERATIONS, MICRO_BATCHES = 8, 4
FIRST_DEATH, LAST_DEATH = 1, 3
"""Iterations. While links are set up, in the first, no rank is outlived."""
LONGEST_S, ITERATION_MS, ADMISSION_MS = 140.0, 250, 60
RESTARTS = 8
"""How often each rank is started again: one that is not admitted as another dies, too, and all lanes of a cell."""
LEFT_BEHIND_S = 15.0
"""A planner ends once it has its plan, and machines that run campaigns are busy."""
WITHIN = {"losses": 1e-6, "grad norms": 1e-5, "parameters": 1e-5}
"""Largest distances from the training without deaths, as shares of the whole."""
WITHIN_BF16 = {"losses": 1e-3, "grad norms": 3e-3, "parameters": 1e-3}
"""The same of parameters that are rounded to 8 bits after each step: sums in another order round some of them apart."""
LOST_LOSSES = 0.05
"""Share of a mean loss by which the losses of some micro-batches may change it."""
KILLED = -9
SHARDED = "--use-distributed-optimizer"
INSTANCES = "--num-distributed-optimizer-instances"
LOST = "restart from the last checkpoint"
BACK = "has the state of the job"
"""What a rank logs that has been started again, in time to go on with the others."""
LATE = "others have come to the end of the training"
"""What a rank says that stands ready when there is no iteration left."""
MARK = "ADAPTRA_CAMPAIGN_OF_DEATHS"
"""What all processes of a training have in their environment: its directory."""


@dataclass(frozen=True)
class Layout:
    """Cells and features of one training."""

    replicas: int
    stages: int
    tensor: int = 1
    flags: str = ""
    micro_batches: int = MICRO_BATCHES
    iterations: int = ITERATIONS
    adaptra: str = "--adaptra --adaptra-reroute failures --adaptra-host-transport shm"
    within: Mapping[str, float] = field(default_factory=lambda: WITHIN)

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages * self.tensor

    def cell(self, rank: int) -> tuple[int, int]:
        """Replica and stage of a rank, in Megatron's order: tensor lanes innermost, then replicas, then stages."""
        return rank // self.tensor % self.replicas, rank // (self.tensor * self.replicas)

    def is_lost(self, dead: Collection[tuple[int, int]]) -> bool:
        """Return whether something of the model is on no cell but `dead` ones: all of a stage, or a shard of the
        optimizer's state, of which the next replica has a copy, or those at its place in the other instances."""
        words = self.flags.split()
        others = range(1, 2 if SHARDED in words else self.replicas)
        if INSTANCES in words:
            instances = int(words[words.index(INSTANCES) + 1])
            others = range(self.replicas // instances, self.replicas, self.replicas // instances)
        return any(
            (each, stage) in dead and all(((each + other) % self.replicas, stage) in dead for other in others)
            for each in range(self.replicas)
            for stage in range(self.stages)
        )

    def arguments(self, directory: Path, deaths: Sequence[str]) -> list[str]:
        """Arguments of scripts/train_gpt.py. `deaths`: see --emulate-death."""
        dying = [word for death in deaths for word in ("--emulate-death", death)]
        layout = (
            f"--emulate-cpu --pipeline-model-parallel-size {self.stages} --tensor-model-parallel-size {self.tensor} "
            f"--num-layers {self.stages} --mock-data --no-gradient-accumulation-fusion --hidden-size 32 "
            f"--seq-length 16 --global-batch-size {self.micro_batches * self.replicas} "
            f"--train-iters {self.iterations} --eval-iters 1 --eval-interval {self.iterations // 2} "
            f"--dump-state {directory} {self.adaptra} {self.flags}"
        )
        return [*layout.split(), *dying]


OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
DROPOUT = "--calculate-per-token-loss --mock-data-padded --hidden-dropout 0.1 --attention-dropout 0.1"
CHUNKS = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = (
    *(
        replace(layout, micro_batches=3, iterations=6)
        for layout in (
            Layout(3, 2),
            Layout(3, 2, flags=OVERLAPPED),
            Layout(2, 3, flags="--overlap-grad-reduce"),
            Layout(2, 2, tensor=2, flags="--sequence-parallel"),
            Layout(4, 2, flags=OVERLAPPED),
            Layout(4, 2, flags=f"{OVERLAPPED} {INSTANCES} 2"),
            Layout(3, 2, flags=DROPOUT),
        )
    ),
    Layout(3, 2, flags=f"{SHARDED} {CHUNKS}", iterations=6),
    Layout(3, 2, flags=f"{OVERLAPPED} --bf16", micro_batches=3, iterations=6, within=WITHIN_BF16),
)
"""Layouts of the campaign: trainings that are as short as those can be in which ranks die, come back and die again."""


def train(
    layout: Layout,
    directory: Path,
    server: ForkServer,
    deaths: Sequence[str] = (),
    *,
    back: Sequence[int] = (),
    host: Host | None = None,
) -> list[RankResult]:
    """One training. `back`: iterations that wait until all ranks that have died have been started again; without any no
    rank is. `host`: that of the job. Raises LaunchError for a training that hangs."""
    waits = (word for iteration in back for word in ("--emulate-wait-for-arrivals", str(iteration)))
    argv = [TRAIN_GPT, *layout.arguments(directory, deaths), *waits]
    return run_outlived(
        layout.world_size,
        argv,
        timeout_s=LONGEST_S,
        server=server,
        log_directory=directory / "logs",
        env={MARK: str(directory)},
        host=Host(layout.world_size, restarts=len(back)) if host is None else host,
    )


def problems(
    layout: Layout,
    peace: Path,
    directory: Path,
    results: Sequence[RankResult],
    struck: Collection[tuple[int, int]] = (),
) -> list[str]:
    """What is wrong with a training whose ranks died, beside that in `peace`; empty where all is as it should be.
    `struck`: cells that have died at any time, where they come back."""
    dead = {layout.cell(result.rank) for result in results if result.returncode == KILLED}
    back = {result.rank for result in results if BACK in result.output}
    rest = [result for result in results if layout.cell(result.rank) not in dead]
    if layout.is_lost(struck) and any(LOST in result.output for result in results):
        return [f"rank {each.rank} ends well without what is lost" for each in results if not each.returncode]
    if layout.is_lost(dead):
        silent = [each.rank for each in rest if LOST not in each.output]
        return [f"rank {rank} does not say that something is lost" for rank in silent]
    late = [each for each in rest if each.returncode and struck and LATE in each.output]
    dead |= {layout.cell(each.rank) for each in late}
    rest = [each for each in rest if layout.cell(each.rank) not in dead]
    found = [f"rank {each.rank} exits with {each.returncode}" for each in rest if each.returncode]
    if found:
        return found
    prints: dict[tuple[int, int], set[str]] = {}
    # One that dies between the commit and the sum of losses takes those of its micro-batches with it, into no log.
    losing = [*dead, *(layout.cell(each.rank) for each in results for _ in range(each.output.count(BACK)))]
    lost = sum(stage == layout.stages - 1 for _, stage in losing)
    for rank in (each.rank for each in rest):
        tensors, expected = dumped(directory, rank), dumped(peace, rank)
        if rank in back:
            expected = last(expected, tensors)
        stage, lane = layout.cell(rank)[1], rank % layout.tensor
        parameters = {name: value for name, value in tensors.items() if name.startswith("parameter ")}
        prints.setdefault((stage, lane), set()).add(fingerprint(parameters))
        within = layout.within["losses"]
        kinds = ("losses", "evaluation losses")
        odd = [name for name in kinds if _differing(expected[name], tensors[name], within) > lost]
        try:
            distances = relative_distances(_without_losses(expected), _without_losses(tensors))
        except ResultsDifferError as cause:
            found.append(f"rank {rank}: {cause}")
            continue
        far = [f"{each} differ by {share:.2e}" for each, share in distances.items() if share > layout.within[each]]
        found += [f"rank {rank}: {each}" for each in (*far, *(f"too many {name} differ" for name in odd))]
    return found + [f"replicas of stage {stage} differ" for (stage, _), each in prints.items() if len(each) > 1]


def dumped(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    """What a rank has come to, without what it reports for others: the losses of single micro-batches."""
    found: dict[str, torch.Tensor] = torch.load(directory / f"rank{rank}.pt", weights_only=True)["tensors"]
    return {name: tensor for name, tensor in found.items() if "micro-batch" not in name}


def _differing(expected: torch.Tensor, found: torch.Tensor, within: float) -> int:
    """Number of losses that are not what they should be; all where one is far from it."""
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=LOST_LOSSES, atol=0.0):
        return max(1, expected.numel())
    return int((~torch.isclose(expected, found, rtol=within, atol=0.0)).sum())


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


@dataclass(frozen=True)
class Story:
    """Deaths of one run (see --emulate-death), and the iterations that wait until all stand ready again."""

    deaths: tuple[str, ...]
    back: tuple[int, ...] = ()

    def struck(self, layout: Layout) -> set[tuple[int, int]]:
        """Cells that die at any time, of runs whose ranks are started again."""
        return {layout.cell(int(death.partition(":")[0])) for death in self.deaths} if self.back else set()


def random_deaths(layout: Layout, chosen: random.Random) -> Story:
    """One to three, at any moment of the first iterations."""
    ranks = chosen.sample(range(layout.world_size), chosen.choice((1, 1, 2, 3)))
    return Story(
        tuple(f"{rank}:{chosen.randint(FIRST_DEATH, LAST_DEATH)}:+{chosen.randint(0, ITERATION_MS)}" for rank in ranks)
    )


def random_returns(layout: Layout, chosen: random.Random) -> Story:
    """Deaths of ranks that are started again, some of which die again, or of others as they are admitted. One story in
    ten may lose something of the model."""
    while True:
        ranks = chosen.sample(range(layout.world_size), chosen.choice((1, 1, 2, 3)))
        deaths = [
            f"{rank}:{chosen.randint(FIRST_DEATH, FIRST_DEATH + 1)}:+{chosen.randint(0, ITERATION_MS)}"
            for rank in ranks
        ]
        if chosen.random() < 0.3:
            deaths.append(f"{chosen.choice(ranks)}:{LAST_DEATH}:+{chosen.randint(0, ITERATION_MS)}")
        if (point := chosen.choice((None, *POINTS))) is not None:
            others = sorted(set(range(layout.world_size)) - set(ranks))
            sends = point in ("admitting", "sending")
            after_ms = chosen.choice((0, chosen.randint(0, ADMISSION_MS)))
            deaths.append(f"{chosen.choice(others if sends else ranks)}:{int(not sends)}:{point}+{after_ms}")
        first = chosen.randint(FIRST_DEATH + 1, LAST_DEATH)
        story = Story(tuple(dict.fromkeys(deaths)), tuple(range(first, layout.iterations)))
        if not layout.is_lost(story.struck(layout)) or chosen.random() < 0.1:
            return story


def left_behind(directory: Path, timeout_s: float = LEFT_BEHIND_S) -> list[str]:
    """Processes of the training in `directory` that still run after `timeout_s`."""
    mark, deadline_s = f"{MARK}={directory}".encode(), time.monotonic() + timeout_s
    while True:
        found = [f"process {pid} is left: {command}" for pid, command in _marked(mark)]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def _marked(mark: bytes) -> list[tuple[int, str]]:
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@dataclass
class Tally:
    """What has happened in all runs."""

    counts: Counter[str] = field(default_factory=Counter)
    redone_s: list[float] = field(default_factory=list)
    """See `pauses_s`."""
    admitted_s: list[float] = field(default_factory=list)
    """For how long the others waited for newcomers."""
    problems: list[str] = field(default_factory=list)
    """Each with the run that it is of, whose logs are kept."""

    def add(self, layout: Layout, story: Story, results: Sequence[RankResult], host: Host) -> None:
        """Count a run."""
        self.counts["deaths"] += sum(each.exit_code == KILLED for each in host.endings)
        self.counts["restarts"] += sum(each.start > 0 for each in host.endings)
        self.counts["with restarts"] += bool(story.back)
        self.counts["with the distributed optimizer"] += SHARDED in layout.flags
        self.counts["with all ranks at the end"] += not any(result.returncode for result in results)
        self.counts["that lost something"] += any(LOST in result.output for result in results)
        self.redone_s += pauses_s(results)
        texts = (result.output for result in results)
        self.admitted_s += [float(found) for text in texts for found in re.findall(r"back, after ([0-9.]+) s", text)]

    def summary(self, runs: int) -> str:
        """One line."""
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        times = [
            f"{what} {median(times):.2f} s (median), {max(times):.2f} s at most"
            for what, times in (("redone after", self.redone_s), ("admitted after", self.admitted_s))
            if times
        ]
        return "; ".join([f"{runs} runs: {counted}", *times, f"{len(self.problems)} problems"])


def campaign(
    runs: int,
    seed: int,
    directory: Path,
    server: ForkServer,
    say: Callable[[str], object],
    seconds: float | None = None,
    *,
    again: bool = False,
) -> list[str]:
    """Run it, for `seconds` or that many `runs`; all problems, each with the run that it is of, whose logs are kept.
    `again`: see --again."""
    chosen, tally, done, deadline_s = random.Random(seed), Tally(), 0, time.monotonic() + (seconds or 0.0)
    for number, layout in enumerate(LAYOUTS):
        results = train(layout, directory / f"peace{number}", server)
        assert not any(result.returncode for result in results), f"{layout} fails without deaths"
    for run in itertools.count() if seconds is not None else range(runs):
        number = run % len(LAYOUTS)
        layout = LAYOUTS[number]
        story = (random_deaths if run // len(LAYOUTS) % 2 else random_returns)(layout, chosen)
        if seconds is not None and time.monotonic() > deadline_s:
            break
        wrong = one_run(layout, story, directory / f"run{run}", directory / f"peace{number}", server, tally)
        if wrong and again and not any("differ" in each for each in wrong):
            say(f"run {run}: {' '.join(story.deaths)} {story.back or ''}: {wrong}; it runs again")
            wrong = one_run(layout, story, directory / f"run{run}-again", directory / f"peace{number}", server, tally)
        tally.problems += [f"run {run}, {layout}, {story}: {each}" for each in wrong]
        say(f"run {run}: {' '.join(story.deaths)} {story.back or ''}: {wrong or 'as without deaths'}")
        done += 1
    say(tally.summary(done))
    return tally.problems


def one_run(layout: Layout, story: Story, place: Path, peace: Path, server: ForkServer, tally: Tally) -> list[str]:
    """One training; what is wrong with it. Its logs are kept where something is."""
    host = Host(layout.world_size, restarts=RESTARTS if story.back else 0)
    try:
        results = train(layout, place, server, story.deaths, back=story.back, host=host)
    except LaunchError as hung:
        wrong, results = [str(hung).splitlines()[0]], hung.results
    else:
        wrong = problems(layout, peace, place, results, story.struck(layout))
    wrong += left_behind(place)
    tally.add(layout, story, results, host)
    if not wrong:
        shutil.rmtree(place)
    return wrong


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.deaths", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="run until the time is up, whatever --runs says")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/deaths"))
    parser.add_argument(
        "--again",
        action="store_true",
        help="run once more what went wrong, which counts if it does again; numbers that differ count at once",
    )
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.output, ignore_errors=True)
    with ForkServer() as server:
        found = campaign(
            *(arguments.runs, arguments.seed, arguments.output, server, _say, arguments.seconds), again=arguments.again
        )
    sys.stdout.write("".join(f"{problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
