# SPDX-License-Identifier: Apache-2.0
"""Replicas that run different orders never wait for each other in a circle, on the model of the device.

Either each has a plan of its own, or cells compute the micro-batches of dead ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.device_model import Device, Rank, from_runtime, play
from support.device_model.calls import Communicator
from support.device_model.cases import random_costs, with_device_waits
from support.device_model.from_runtime import (
    Iteration,
    Job,
    RecordingComputation,
    RecordingTimer,
    RecordingTransport,
    Reductions,
)
from support.device_model.other_rules import JustInTime
from support.device_model.recording import Recorder
from support.made_up.job import SECRET, layout
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.engine.execution import executor
from adaptra_megatron.engine.execution.executor import ActivationAccount, PipelineExecutor
from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import Program
from adaptra_megatron.engine.rerouting import DegradedRoutes, routed_program
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.planner import plan

CASES = range(24)
SERIAL = Device(queues=1, serial=True, trailing_waits=True)
MANY_QUEUES = Device(queues=10_000)
DEVICES = (SERIAL, MANY_QUEUES, Device(queues=8, connected=False))
differing_executor = functools.partial(PipelineExecutor, plans_differ=True)


class DifferingPlans:
    """Two replicas, each with a plan for costs of its own: one iteration of two or three chunks per stage."""

    def __init__(self, seed: int) -> None:
        random = self._random = Random(seed)
        stages, chunks = random.randint(2, 4), random.choice((2, 2, 3))
        self.seed, self._stages = seed, stages
        self._costs = [random_costs(random, stages, chunks, stages * random.choice((1, 2))) for _ in range(2)]
        self._split = random.random() < 0.8

    def deadlock(self, device: Device) -> str | None:
        """With the whole device waited for before some calls."""
        ranks = {}
        for replica, costs in enumerate(self._costs):
            schedule = plan(costs, deadline_s=0.0, split=self._split).schedule
            iteration = Iteration(schedule=schedule, costs=costs, planned_for=costs, reduction="overlapped")
            job = Job(iterations=(iteration,), replicas=2, sizes_vary=self.seed % 5 == 0)
            with mock.patch.object(from_runtime, "PipelineExecutor", differing_executor):
                for stage in range(self._stages):
                    program = with_device_waits(job.record(stage), "some", self._random)
                    ranks[Rank(replica, stage)] = {"training": program}
        return play(ranks, device, self.seed).deadlock


def test_plans_differ_without_deadlock() -> None:
    for seed in CASES:
        assert (found := DifferingPlans(seed).deadlock(DEVICES[seed % 3])) is None, (seed, found)


def test_reductions_that_start_as_soon_as_a_chunk_is_complete_deadlock() -> None:
    """In one queue, since a later action stands behind a reduction that waits for another replica."""
    with mock.patch.object(executor, "GradientSync", without_places(executor.GradientSync)):
        assert sum(DifferingPlans(seed).deadlock(SERIAL) is not None for seed in CASES) > 1


def without_places(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, not_before, **how: made(*arguments, **how)


class DeadCells:
    """A job with dead cells: one iteration of training or of evaluation. Ranks stand for stages of one pipeline."""

    def __init__(self, seed: int, chunks: int, *, training: bool = True) -> None:
        random = self._random = Random(seed)
        replicas, stages = random.randint(2, 4), random.randint(2, 4)
        micro_batches = stages * random.choice((1, 2)) if chunks > 1 else random.randint(1, 8)
        self.seed, self._training = seed, training
        self._costs = random_costs(random, stages, chunks, micro_batches)
        dead = set[Cell]()
        while not dead:
            for stage in range(stages):
                survivor = random.randrange(replicas)
                dead |= {Cell(each, stage) for each in range(replicas) if each != survivor and random.random() < 0.4}
        self._cells = [Cell(*divmod(rank, stages)) for rank in range(replicas * stages)]
        self._live = [rank for rank, cell in enumerate(self._cells) if cell not in dead]
        self._generation = Generation(GenerationId(1), frozenset(self._live), frozenset(dead))
        self._control = ControlStore(HashStore(), SECRET, "job").in_generation(self._generation.id)
        self._iteration = Iteration(
            schedule=stock_order(stages, micro_batches, chunks),
            costs=self._costs,
            training=training,
            reduction=random.choice(("overlapped", "final")),
        )

    def deadlock(
        self,
        device: Device,
        rule: type[Inbox] = Inbox,
        change: Callable[[Program], Program] = lambda program: program,
    ) -> str | None:
        """With the whole device waited for before some calls, and receives posted by `rule`."""
        ranks = {}
        with mock.patch.multiple(executor, current_device=lambda: torch.device("cpu"), Inbox=rule):
            for rank in self._live:
                recorder = Recorder()
                self._record(recorder, rank, change)
                ranks[Rank(0, rank)] = {"training": with_device_waits(recorder.program, "some", self._random)}
        return play(ranks, device, self.seed).deadlock

    def _record(self, recorder: Recorder, rank: int, change: Callable[[Program], Program]) -> None:
        costs, stages, ranks = self._costs, self._costs.stages, range(len(self._cells))
        seen = layout([ranks[first : first + stages] for first in range(0, len(ranks), stages)], rank)
        # Some of these jobs have one hardware queue, which plans around dead cells do without.
        known = dataclasses.replace(costs, shared_queue=self.seed % 2 == 0)
        routes = DegradedRoutes(seen, self._generation, self._control, 5.0, lambda: None)
        order = routes.order(known, split=True, forward_only=not self._training)
        reductions = CellReductions(recorder, seen, self._iteration, self._live)
        call = SimpleNamespace(
            stage=seen.cell.stage,
            config=reductions.config,
            model_chunks=reductions.model_chunks,
            message_shape=(1,),
            forward_only=not self._training,
            interleaved=costs.chunks > 1,
            chunks=costs.chunks,
        )
        transport = RecordingTransport(recorder, rank, RankLinks(costs), sizes_vary=False)  # type: ignore[arg-type]
        differing_executor(transport, RecordingTimer(recorder, marks=False), timeout_s=1.0).run(
            call,  # type: ignore[arg-type]
            RecordingComputation(recorder, seen.cell.stage, 0, costs, reductions),
            change(routed_program(order, seen, self._iteration.schedule)),
            addresses=Addresses(ranks, 0, micro_batches=costs.micro_batches, pipeline=seen.pipeline),
            account=ActivationAccount(seen.cell.stage, None, 0.0),
        )
        if self._training:
            reductions.finalize(seen.cell.stage, stages)


class RankLinks:
    """Costs of links between ranks: those of their stages."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def link(self, source: int, target: int) -> LinkCost:
        """Return the cost between the stages of two ranks."""
        return self._costs.link(source % self._costs.stages, target % self._costs.stages)


class CellReductions(Reductions):
    """Reductions over the live cells of a stage, and over the live ends of a replica."""

    def __init__(self, recorder: Recorder, seen: JobLayout, iteration: Iteration, live: list[int]) -> None:
        stages, stage, replica = iteration.schedule.stages, seen.cell.stage, seen.cell.replica
        members = frozenset(rank for rank in live if rank % stages == stage)
        super().__init__(recorder, len(members), iteration)
        self._gradients = Communicator(f"gradients of stage {stage}", stages=members)
        ends = frozenset({replica * stages, replica * stages + stages - 1} & set(live))
        self._embedding, self._ends = Communicator(f"embedding of replica {replica}", stages=ends), len(ends)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_cells_compute_others_micro_batches_without_deadlock(training: bool) -> None:
    for seed in CASES:
        found = DeadCells(seed, 1 + seed % 2, training=training).deadlock(DEVICES[seed % 3])
        assert found is None, (seed, found)


def test_they_deadlock_by_other_rules() -> None:
    cases = [DeadCells(seed, 2) for seed in CASES]
    assert sum(case.deadlock(SERIAL, JustInTime) is not None for case in cases) > 1
    assert sum(case.deadlock(SERIAL, change=reduces_at_once) is not None for case in cases) > 1
    evaluations = [DeadCells(seed, 2, training=False) for seed in CASES]
    assert sum(case.deadlock(MANY_QUEUES, JustInTime) is not None for case in evaluations) > 1


def reduces_at_once(program: Program) -> Program:
    """Start reductions as soon as a cell has completed a chunk."""
    kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    last = {step.action.chunk: step.position for step in program.steps if step.action.kind in kinds}
    steps = [
        dataclasses.replace(step, completes_chunk=last.get(step.action.chunk) == step.position)
        for step in program.steps
    ]
    return dataclasses.replace(program, steps=tuple(steps), reductions=dict.fromkeys(last, 0))
