# SPDX-License-Identifier: Apache-2.0
"""Small trainings whose ranks fail, and how what the others compute differs from the training without failures.

Sums are exact in any order (testing.training.exact_sums), so parameters and losses are compared by
equality, whatever the size of the model.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult
from testing.jobs.fault_tolerant_jobs import Host, run_with_failures
from testing.jobs.fork_server import ForkServer
from testing.results import ResultsDifferError, fingerprint, relative_distances
from testing.training.checkpointing import unreadable

TRAIN_GPT = str(Path(__file__).parents[1] / "scripts/train_gpt.py")
ITERATIONS, MICRO_BATCHES = 8, 4
LONGEST_S = 140.0
LEFT_BEHIND_S = 15.0
"""A planner ends once it has its plan, and machines that run campaigns are busy."""
WITHIN = {"losses": 1e-12, "grad norms": 1e-6, "parameters": 0.0}
"""Largest distances from the training without deaths, as shares of the whole. Norms are summed up in 32 bits, in an
order that depends on who lives."""
WITHIN_ROUNDED = {"losses": 1e-6, "grad norms": 1e-5, "parameters": 1e-5}
"""The same where gradients are not rounded, and clipped by their norms."""
LOST_LOSSES = 0.05
"""Share of a mean loss by which the losses of some micro-batches may change it."""
KILLED = -9
SHARDED = "--use-distributed-optimizer"
INSTANCES = "--num-distributed-optimizer-instances"
LOST = "restart from the last checkpoint"
BACK = "has the state of the job"
"""What a rank logs that has been started again, in time to go on with the others."""
LATE = "other ranks have finished the training"
"""What a rank says that stands ready when there is no iteration left."""
MARK = "ADAPTRA_CAMPAIGN_OF_DEATHS"
"""What all processes of a training have in their environment: its directory."""


@dataclass(frozen=True)
class Layout:
    """Cells and features of one training."""

    replicas: int
    stages: int
    tensor: int = 1
    expert: int = 1
    """Number of data-parallel ranks in each replica, which its experts span."""
    flags: str = ""
    micro_batches: int = MICRO_BATCHES
    iterations: int = ITERATIONS
    adaptra: str = "--adaptra --adaptra-reroute failures --adaptra-host-transport shm"
    exact: bool = True
    """Whether the order of sums changes nothing: gradients are rounded, and not clipped, for norms are not exact."""
    iteration_ms: int = 250
    """About how long an iteration lasts."""
    norms_within: float = 1e-6
    """As in WITHIN: torch's norm of millions of numbers is that far from the sum of their squares, which stands in for
    it where a shard's owner has died."""

    @property
    def within(self) -> Mapping[str, float]:
        """Largest distances from the training without deaths."""
        return {**WITHIN, "grad norms": self.norms_within} if self.exact else WITHIN_ROUNDED

    @property
    def lanes(self) -> int:
        """Number of ranks in a cell."""
        return self.tensor * self.expert

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages * self.lanes

    def cell(self, rank: int) -> tuple[int, int]:
        """Replica and stage of a rank, in Megatron's order: lanes innermost, then replicas, then stages."""
        return rank // self.lanes % self.replicas, rank // (self.lanes * self.replicas)

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

    def arguments(self, directory: Path, deaths: Sequence[str], late: Sequence[str] = ()) -> list[str]:
        """Arguments of scripts/train_gpt.py. `deaths`: see --emulate-death. `late`: see --emulate-late."""
        dying = [word for death in deaths for word in ("--emulate-death", death)]
        dying += [word for each in late for word in ("--emulate-late", each)]
        exact = "--emulate-exact-sums --clip-grad 1e6" if self.exact else ""
        layout = (
            f"--emulate-cpu --pipeline-model-parallel-size {self.stages} --tensor-model-parallel-size {self.tensor} "
            f"--expert-model-parallel-size {self.expert} "
            f"--num-layers {self.stages} --mock-data --hidden-size 32 "
            f"--seq-length 16 --global-batch-size {self.micro_batches * self.replicas * self.expert} "
            f"--train-iters {self.iterations} --eval-iters 1 --eval-interval {self.iterations // 2} "
            f"--dump-state {directory} {exact} {self.adaptra} {self.flags.format(directory=directory)}"
        )
        return [*layout.split(), *dying]


OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
DROPOUT = "--calculate-per-token-loss --mock-data-padded --hidden-dropout 0.1 --attention-dropout 0.1"
CHUNKS = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
SAVES = "--save {directory}/checkpoints --save-interval 2 --async-save --emulate-write-ms 150"
EXPERTS = "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
LARGE = "--hidden-size 1536 --ffn-hidden-size 512"
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
            Layout(3, 2, flags=DROPOUT, exact=False),
            Layout(3, 2, flags=EXPERTS),
            Layout(2, 2, expert=2, flags=f"{EXPERTS} {OVERLAPPED}"),
            Layout(3, 2, flags=f"{OVERLAPPED} {SAVES}"),
        )
    ),
    Layout(3, 2, flags=f"{SHARDED} {CHUNKS}", iterations=6),
    Layout(3, 2, flags=f"{OVERLAPPED} --bf16", micro_batches=3, iterations=6),
    Layout(2, 2, flags=f"{OVERLAPPED} {LARGE}", micro_batches=1, iterations=5, iteration_ms=600, norms_within=1e-3),
)
"""Layouts of the campaign: trainings that are as short as those can be in which ranks die, come back and die again; in
the last one, of 44 MB of gradients per stage, a reduction is under way for longer than it takes to see a death."""


def train(
    layout: Layout,
    directory: Path,
    server: ForkServer | None,
    deaths: Sequence[str] = (),
    *,
    late: Sequence[str] = (),
    back: Sequence[int] = (),
    host: Host | None = None,
    program: Sequence[str] = (),
) -> list[RankResult]:
    """One training. `deaths`, `late`: see `Layout.arguments`. `back`: iterations that wait until all ranks that have
    died have been started again; without any no rank is. `host`: that of the job. `program`: a script that runs the
    training's script. Raises LaunchError for a training that hangs."""
    waits = (word for iteration in back for word in ("--emulate-wait-for-arrivals", str(iteration)))
    argv = [*program, TRAIN_GPT, *layout.arguments(directory, deaths, late), *waits]
    return run_with_failures(
        layout.world_size,
        argv,
        timeout_s=LONGEST_S,
        server=server,
        log_directory=directory / "logs",
        env={MARK: str(directory.resolve())},
        host=Host(layout.world_size, restarts=len(back)) if host is None else host,
    )


def problems(
    layout: Layout,
    peace: Path,
    directory: Path,
    results: Sequence[RankResult],
    struck: Collection[tuple[int, int]] = (),
) -> list[str]:
    """How a training whose ranks failed differs from that in `peace`; empty if it does not.
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
    found += unreadable(directory / "checkpoints")
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
        stage, lane = layout.cell(rank)[1], rank % layout.lanes
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
    return {name: each[len(each) - len(found[name]) :] if name in series else each for name, each in expected.items()}


def _without_losses(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "losses" not in name}


def pauses_s(results: Sequence[RankResult]) -> list[float]:
    """Seconds from each death that was seen to the commit of what was redone."""
    texts = (result.output for result in results if result.returncode == 0)
    return [float(found) for text in texts for found in re.findall(r"run again ([0-9.]+) s after", text)]


def left_behind(directory: Path, timeout_s: float = LEFT_BEHIND_S) -> list[str]:
    """Processes of the training in `directory` that still run after `timeout_s`."""
    mark, deadline_s = f"{MARK}={directory.resolve()}".encode(), time.monotonic() + timeout_s
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
