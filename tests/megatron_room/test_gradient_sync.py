# SPDX-License-Identifier: Apache-2.0
"""When gradient reduction and parameter gathering start: Megatron's rule, for any order of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.engine.execution.stage_program import compile_program
from adaptra_megatron.megatron.gradients.gradient_sync import GradientSync, ParameterSync
from adaptra_megatron.schedule.ir import Kind, Schedule


class Job:
    """Model chunks under a data parallelism that writes down what happens; backwards reduce while it is on."""

    def __init__(self, chunks: int, *, overlap: bool = True, no_sync_each: bool = False) -> None:
        self.events: list[str] = []
        self.off = [0] * chunks
        self.models: list[Any] = [self._model(chunk, overlap) for chunk in range(chunks)]
        contexts = [self._no_sync_of([chunk]) for chunk in range(chunks)]
        self.config = SimpleNamespace(
            no_sync_func=contexts if no_sync_each else self._no_sync_of(range(chunks)),
            grad_sync_func=None,
            param_sync_func=None,
        )

    def _model(self, chunk: int, overlap: bool) -> Any:
        return SimpleNamespace(
            ddp_config=SimpleNamespace(overlap_grad_reduce=overlap),
            start_grad_sync=lambda: self.events.append(f"start {chunk}"),
            parameters=lambda: f"parameters {chunk}",
        )

    def _no_sync_of(self, chunks: Any) -> Any:
        @contextmanager
        def no_sync() -> Iterator[None]:
            for chunk in chunks:
                self.off[chunk] += 1
            yield
            for chunk in chunks:
                self.off[chunk] -= 1

        return no_sync

    def sync_functions(self, word: str, *, one: bool) -> Any:
        """grad_sync_func or param_sync_func: one for all chunks, or one per chunk."""
        if one:
            return lambda parameters: self.events.append(f"{word} {parameters}")
        return [
            lambda parameters, chunk=chunk: self.events.append(f"{word}[{chunk}] {parameters}")
            for chunk in range(len(self.models))
        ]

    def backward(self, chunk: int) -> None:
        """Whole backward: hooks reduce unless synchronisation is off."""
        assert self.off[chunk] in (0, 1)
        if not self.off[chunk]:
            self.events.append(f"hooks {chunk}")


def drive(job: Job, sync: GradientSync, schedule: Schedule, stage: int) -> list[int]:
    """One iteration as the executor runs it; positions of the events among the steps."""
    moments: list[int] = []
    for index, step in enumerate(compile_program(schedule, stage).steps):
        action = step.action
        before = len(job.events)
        if step.completes_chunk and action.kind is Kind.BACKWARD:
            sync.before_last_backward(action.chunk)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            job.backward(action.chunk)
        if step.completes_chunk:
            sync.after_last_gradient(action.chunk)
        new = job.events[before:]
        assert len(new) == int(step.completes_chunk), f"{action}: {new}"
        assert all(event.endswith(f" {action.chunk}") for event in new)
        moments += [index] * len(new)
        assert all(job.off), "on between two actions: a backward of another chunk would start reducing"
    return moments


@given(st.one_of(named_schedules(), random_schedules()), st.booleans())
def test_each_chunk_is_reduced_once_with_its_last_gradient(schedule: Schedule, no_sync_each: bool) -> None:
    for stage in range(schedule.stages):
        job = Job(schedule.chunks, no_sync_each=no_sync_each)
        sync = GradientSync(job.config, job.models, compile_program(schedule, stage).completion)
        drive(job, sync, schedule, stage)
        sync.finish()
        assert Counter(event.split()[1] for event in job.events) == {str(chunk): 1 for chunk in range(schedule.chunks)}
        last = {action.chunk: action.kind for action in schedule.orders[stage] if action.kind is not Kind.FORWARD}
        for event in job.events:
            how, chunk = event.split()
            whole = last[int(chunk)] is Kind.BACKWARD
            assert how == ("hooks" if whole else "start")
        assert job.off == [0] * schedule.chunks, "left off: the next reduction would never start"


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("kind", [Kind.BACKWARD, Kind.BACKWARD_WEIGHT])
def test_a_grad_sync_function_is_called_after_the_last_gradient(one: bool, kind: Kind) -> None:
    job = Job(2)
    job.config.grad_sync_func = job.sync_functions("reduce", one=one)
    sync = GradientSync(job.config, job.models, [1, 0])
    if kind is Kind.BACKWARD:
        sync.before_last_backward(1)
        job.backward(1)
        assert job.events == [], "hooks start nothing where Megatron was given a function for it"
    sync.after_last_gradient(1)
    assert job.events == ["reduce parameters 1" if one else "reduce[1] parameters 1"]
    sync.finish()
    assert job.events[1:] == ["reduce parameters 0" if one else "reduce[0] parameters 0"]


@given(st.permutations(range(4)), st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_reductions_start_in_the_planned_order_whichever_chunk_is_complete_first(
    planned: list[int], complete: list[int], whole: set[int]
) -> None:
    """As replicas of a stage that dispatch online need it: theirs are collectives."""
    job = Job(4)
    sync = GradientSync(job.config, job.models, planned, by_hooks=False)
    for count, chunk in enumerate(complete, 1):
        if chunk in whole:
            sync.before_last_backward(chunk)
            job.backward(chunk)
        sync.after_last_gradient(chunk)
        in_turn = next((turn for turn, other in enumerate(planned) if other not in complete[:count]), 4)
        assert job.events == [f"start {other}" for other in planned[:in_turn]]
    sync.finish()
    assert job.events == [f"start {other}" for other in planned]


@given(named_schedules(), random_schedules(), st.data())
def test_replicas_with_plans_of_their_own_start_reductions_alike(
    one: Schedule, other: Schedule, data: st.DataObject
) -> None:
    """Neither the order of chunks nor who starts a chunk's buckets depends on the plan."""
    chunks = min(one.chunks, other.chunks)
    started = []
    for schedule in (one, other):
        job, stage = Job(schedule.chunks), data.draw(st.integers(0, schedule.stages - 1))
        sync = GradientSync(job.config, job.models, range(schedule.chunks)[::-1], by_hooks=False)
        for step in compile_program(schedule, stage).steps:
            if step.completes_chunk and step.action.kind is Kind.BACKWARD:
                sync.before_last_backward(step.action.chunk)
            if step.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                job.backward(step.action.chunk)
            if step.completes_chunk:
                sync.after_last_gradient(step.action.chunk)
        sync.finish()
        assert job.events == [f"start {chunk}" for chunk in reversed(range(schedule.chunks))]
        started.append(job.events[-chunks:])
    assert started[0] == started[1]


def test_without_overlap_the_reduction_is_left_to_finalize_model_grads() -> None:
    job = Job(1, overlap=False)
    sync = GradientSync(job.config, job.models, [0])
    sync.after_last_gradient(0)
    sync.finish()
    assert job.events == []
    assert job.off == [0]


def test_a_model_without_data_parallel_wrapper_needs_no_synchronisation() -> None:
    config = SimpleNamespace(no_sync_func=None, grad_sync_func=None)
    sync = GradientSync(config, [SimpleNamespace()], [0])  # type: ignore[list-item]
    sync.before_last_backward(0)
    sync.after_last_gradient(0)
    sync.finish()


def test_switching_off_twice_is_switching_off_once() -> None:
    job = Job(2)
    sync = GradientSync(job.config, job.models, [0, 1])
    sync.disable()
    assert job.off == [1, 1]
    sync.enable()
    sync.enable()
    assert job.off == [0, 0]


@pytest.mark.parametrize("one", [True, False])
def test_parameters_are_gathered_one_chunk_ahead_and_once(one: bool) -> None:
    job = Job(4)
    job.config.param_sync_func = job.sync_functions("gather", one=one)
    gathers = [f"gather parameters {chunk}" if one else f"gather[{chunk}] parameters {chunk}" for chunk in range(4)]
    sync = ParameterSync(job.config, job.models)
    assert job.events == gathers[:2]
    for chunk, expected in [(0, 2), (0, 2), (1, 3), (0, 3), (2, 4), (3, 4), (0, 4)]:
        sync.before_forward(chunk)
        assert job.events == gathers[:expected]


@pytest.mark.parametrize("in_gradients", [False, True])
def test_parameters_that_have_been_gathered_since_the_last_step_are_not_gathered_again(in_gradients: bool) -> None:
    """Unless they are gathered in the gradients' memory."""
    job = Job(3)
    job.config.param_sync_func = job.sync_functions("gather", one=True)
    config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=in_gradients)
    for chunk, model in enumerate(job.models):
        groups = [SimpleNamespace(ddp_config=config, param_gather_dispatched=each != chunk) for each in (0, 9)]
        model.bucket_groups, model.expert_parallel_bucket_groups = groups[:1], groups[1:]
    sync = ParameterSync(job.config, job.models)
    sync.before_forward(1)
    assert job.events == [f"gather parameters {chunk}" for chunk in (range(3) if in_gradients else [0])]


def test_a_single_chunk_gathers_nothing_as_in_stock() -> None:
    job = Job(1)
    job.config.param_sync_func = job.sync_functions("gather", one=True)
    ParameterSync(job.config, job.models).before_forward(0)
    assert job.events == []
