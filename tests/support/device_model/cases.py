# SPDX-License-Identifier: Apache-2.0
"""Random jobs for the model of the device: any valid order, planned ones among them, on any device it has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from support.device_model import Device, Outcome, Rank, Threads, play
from support.device_model.calls import DeviceWait, Program
from support.device_model.from_megatron import record_stock
from support.device_model.from_runtime import Iteration, Job
from support.device_model.threads import makers
from support.schedules import random_run

from adaptra_megatron.engine.execution.inbox import Inbox
from adaptra_megatron.schedule.classic import forward_only, gpipe, split_backward, stock_order, zb_h1, zb_h2
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Schedule, ScheduleError, interleaved
from adaptra_megatron.schedule.planner import plan

WAITS = ("none", "some", "at every call")
"""Calls before which hosts wait for their whole device."""
QUEUES = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and what it runs on."""

    seed: int
    job: Job
    device: Device
    waits: str
    makes_communicators: bool = False
    """True if other threads make and abort some during the training."""

    def play(self, rule: Callable[..., Inbox] = Inbox) -> Outcome:
        """With receives posted by `rule`."""
        job = dataclasses.replace(self.job, inbox=rule)
        return self._play([job.record(stage) for stage in range(self.stages)])

    def play_stock(self) -> Outcome:
        """Stock Megatron in its place: its own order, calls and posting, on the same device."""
        first = self.job.iterations[0]
        overlap = first.costs.chunks > 1 and self.seed % 2 == 0
        record = functools.partial(record_stock, costs=first.costs, training=first.training, overlap=overlap)
        return self._play([record(stage) for stage in range(self.stages)])

    @property
    def stages(self) -> int:
        return self.job.iterations[0].schedule.stages

    def _play(self, programs: list[Program]) -> Outcome:
        random = Random(self.seed)
        ranks: dict[Rank, Threads] = {}
        for replica in range(self.job.replicas):
            others: list[Threads] = [{}] * self.stages
            if self.makes_communicators:
                others = makers(replica, self.stages, random, greets=False)
            for stage, program in enumerate(programs):
                training = with_device_waits(program, self.waits, random)
                ranks[Rank(replica, stage)] = {"training": training, **others[stage]}
        return play(ranks, self.device, self.seed)


def random_case(seed: int) -> Case:
    """The same for the same seed. Up to 8 stages, 3 chunks, 32 micro-batches, 2 replicas and 3 iterations."""
    random = Random(seed)
    stages, chunks = random.randint(2, 8), random.choice((1, 1, 1, 2, 2, 3))
    replicas, sizes_vary = random.choice((1, 1, 2)), random.random() < 0.1
    count = random.choice((1, 1, 2, 3))
    job = Job(
        iterations=tuple(_random_iteration(random, stages, chunks) for _ in range(count)),
        replicas=replicas,
        sizes_vary=sizes_vary,
    )
    serial = random.random() < 0.15
    per_transfer, per_collective = random.randint(1, 4), random.randint(1, 16)
    device = Device(
        queues=1 if serial else random.choice(QUEUES),
        serial=serial,
        connected=random.random() < 0.8,
        launch_order=random.choice((None, None, "started", "ended")),
        blocks=random.choice((None, enough_blocks(per_transfer, per_collective))),
        blocks_per_transfer=per_transfer,
        blocks_per_collective=per_collective,
        trailing_waits=random.random() < 0.5,
        launches=random.choice((None, None, 1, 8)),
        noise=random.choice((0.0, 0.5)),
    )
    waits = random.choice(WAITS)
    return Case(seed=seed, job=job, device=device, waits=waits, makes_communicators=random.random() < 0.1)


def enough_blocks(per_transfer: int, per_collective: int) -> int:
    """For one kernel on each stream of NCCL that a stage has, and one block of computation: there are a sending and a
    receiving stream for each of two neighbours, and one each for gradients and embeddings."""
    return 4 * per_transfer + 2 * per_collective + 1


def with_device_waits(program: Program, waits: str, random: Random) -> Program:
    """`program` with waits for the device before some of its calls."""
    if waits == "none":
        return program
    share = 1.0 if waits == "at every call" else random.choice((3.0 / len(program), 0.1, 0.5))
    found: Program = []
    for call in program:
        if random.random() < share:
            found.append(DeviceWait())
        found.append(call)
    return found


def random_costs(random: Random, stages: int, chunks: int, micro_batches: int) -> Costs:
    """Actions of different lengths; some links slow."""

    def table(seconds: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds * random.uniform(0.5, 1.5) for _ in range(chunks)) for _ in range(stages))

    ring = sorted({(a, b % stages) for a in range(stages) for b in (a + 1, a - 1)})
    slow = random.choice((0.0, 0.2, 1.0))
    links = {
        link: LinkCost(
            latency_s=random.choice((0.05, 0.5, 3.0)) if random.random() < slow else 0.01,
            occupancy_s=random.choice((0.01, 0.1)),
        )
        for link in ring
    }
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        forward_s=table(1.0),
        backward_input_s=table(1.0),
        backward_weight_s=table(random.choice((0.3, 1.0))),
        links=links,
        max_in_flight=(max(float(chunks), random.choice((1.0, 1.5, 2.0, 3.0)) * stages),) * stages,
    )


def _random_iteration(random: Random, stages: int, chunks: int) -> Iteration:
    micro_batches = random.randint(1, 32)
    if chunks > 1:  # Megatron's interleaved schedules take whole groups
        micro_batches = stages * max(1, micro_batches // stages)
    costs = random_costs(random, stages, chunks, micro_batches)
    training = random.random() < 0.85
    if training:
        schedule, planned_for = _random_schedule(random, costs)
    else:
        schedule, planned_for = forward_only(stages, micro_batches, chunks), None
    stretch = random.choice((1.0, 1.0, 4.0))  # since it was planned
    links = {link: LinkCost(stretch * cost.latency_s, cost.occupancy_s) for link, cost in costs.links.items()}
    return Iteration(
        schedule=schedule,
        costs=dataclasses.replace(costs, links=links),
        planned_for=planned_for,
        training=training,
        reduction=random.choice(("overlapped", "final")),
        synchronized=random.random() < 0.2,
    )


def _random_schedule(random: Random, costs: Costs) -> tuple[Schedule, Costs | None]:
    """An order for `costs`, and what its launch order is made from."""
    stages, chunks, micro_batches = costs.stages, costs.chunks, costs.micro_batches
    kind = random.choice(
        ("planned", "planned", "planned", "stock", "split", "zero bubble", "any", "all forwards first")
    )
    if kind == "planned":
        return plan(costs, deadline_s=0.0, split=random.random() < 0.8).schedule, costs
    stock = stock_order(stages, micro_batches, chunks)
    if kind == "split":
        return split_backward(stock, random.choice((0, 1, 2, None))), random.choice((None, costs))
    if kind == "zero bubble" and chunks == 1:
        try:
            return random.choice((zb_h1, zb_h2))(stages, micro_batches), None
        except ScheduleError:  # it needs more micro-batches than there are
            return stock, None
    if kind == "any":
        return random_run(interleaved(stages, chunks), micro_batches, random), random.choice((None, costs))
    if kind == "all forwards first":
        return gpipe(stages, micro_batches, chunks=chunks), None
    return stock, random.choice((None, costs))
