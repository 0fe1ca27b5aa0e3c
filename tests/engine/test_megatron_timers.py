# SPDX-License-Identifier: Apache-2.0
"""Megatron's timers of single actions: what is added to them, and that they do not wait for what peers still owe."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adaptra_megatron.patches import enable
from megatron.core.timers import Timer, Timers
from support.processes import RankResult

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.elastic.failure_errors import EpochEndedError
from adaptra_megatron.elastic.generation import FIRST
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.engine.execution.executor import IterationReport
from adaptra_megatron.engine.execution.inbox import Addresses
from adaptra_megatron.engine.execution.stage_program import compile_program
from adaptra_megatron.engine.fault_tolerance import Recovery
from adaptra_megatron.engine.measuring import add_times
from adaptra_megatron.megatron.megatron_iteration import iteration
from adaptra_megatron.megatron.state.attempt_state import running_timers
from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.action_records import ActionRecord

MICRO_BATCHES = 4
REDUCED = ("conditional_embedding", "non_tensor_model_parallel", "word_embedding")
WAITED_S, COMPUTED_S = 0.25, 0.5
"""Seconds of every action, whether it receives or not, so that sums tell which of them were counted."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is waited for, in order."""
    found: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            found.append("stream")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    return found


def report_of(stage: int) -> IterationReport:
    """What a stage of two ran, with backwards split."""
    steps = list(compile_program(split_backward(stock_order(2, MICRO_BATCHES), 1), stage).steps)
    records = []
    for number, step in enumerate(steps):
        action = step.action
        start_s = 10.0 + number
        records.append(
            ActionRecord(
                0,
                stage,
                action.kind.value,
                action.chunk,
                action.micro_batch,
                start_s - WAITED_S,
                start_s,
                start_s + COMPUTED_S,
            )
        )
    return IterationReport(1.0, steps, Addresses((0, 1), 0), 0, over=lambda: True, resolve=lambda: records)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(("stage", "waited"), [(0, "backward-recv"), (1, "forward-recv")])
def test_waiting_and_weight_gradients_are_added(stage: int, waited: str) -> None:
    timers = Timers(2, "max")
    timers("backward-compute", log_level=2).start()
    timers("backward-compute").stop()
    of_megatron_s = timers("backward-compute").elapsed(reset=False)
    for iterations in (1, 2):
        add_times(timers, report_of(stage))
        assert timers(waited).elapsed(reset=False) == pytest.approx(iterations * MICRO_BATCHES * WAITED_S)
        assert timers("backward-compute").elapsed(reset=False) == pytest.approx(
            of_megatron_s + iterations * MICRO_BATCHES * COMPUTED_S
        )
    assert timers(waited).active_time() == pytest.approx(2 * MICRO_BATCHES * WAITED_S)
    assert set(timers._timers) == {"backward-compute", waited}, "a time of what a stage never does"


@pytest.mark.parametrize("level", [0, 1])
def test_less_detail_is_left_alone(level: int) -> None:
    timers = Timers(level, "max")
    add_times(timers, report_of(0))
    assert not timers._timers


def recovery(call: Any) -> Callable[[Callable[..., Any], int], Any]:
    """Runs attempts at a call as a rank does that survives failures: `(attempt, number of the attempt)`."""
    groups = SimpleNamespace(stale=False, gather_missed=lambda: None)
    hooks = Recovery(cast(Any, None), cast(Any, SimpleNamespace(groups=groups, training=None)))
    hooks._kept = cast(Any, SimpleNamespace(keep=lambda: None, restore=lambda: None))
    hooks.manager = cast(Any, SimpleNamespace(turn=0))
    generation = cast(Any, SimpleNamespace(id=FIRST))
    return lambda attempt, number: hooks._attempt(attempt, call, generation, number)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_attempt_that_failed_within_a_forward_times_nothing(level: int) -> None:
    """Training and an evaluation, whose call has no timers: the script reads its batch by those of the job."""
    timers = Timers(level, "max")
    call = SimpleNamespace(config=SimpleNamespace(timers=timers), model_chunks=[], forward_only=False)
    attempts = recovery(call)
    outer = timers("interval-time", log_level=0)
    outer.start()

    def fail(*_given: Any) -> None:
        timers("forward-compute", log_level=2).start()
        timers("batch-generator", log_level=2).start()
        raise EpochEndedError("a rank has failed")

    for _call in ("training", "evaluation"):
        for number in range(3):
            with pytest.raises(EpochEndedError):
                attempts(fail, number)
        attempts(lambda *_given: None, 3)
        call.config.timers, call.forward_only = None, True
    assert running_timers(timers) == {"interval-time"}
    outer.stop()


@pytest.mark.usefixtures("waits")
def test_an_iteration_that_fails_does_not_wait_for_the_device(waits: list[str]) -> None:
    """A reduction over NCCL waits for a rank that has failed, until it is aborted."""
    config = SimpleNamespace(timers=Timers(1, "max"), barrier_with_L1_time=False, finalize_model_grads_func=None)

    def fail() -> None:
        with iteration(cast(Any, SimpleNamespace(config=config))):
            raise EpochEndedError("a rank has failed")

    with pytest.raises(EpochEndedError):
        fail()
    assert waits == ["device"], "as the timer began"


class Struck:
    """A chunk of a model whose reduction ends as a rank fails."""

    bucket_groups = expert_parallel_bucket_groups = ()

    def finish_grad_sync(self, **_keywords: Any) -> None:
        raise EpochEndedError("a rank has failed")

    def zero_grad_buffer(self) -> None:
        pass

    def parameters(self) -> list[Any]:
        return []


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("within", ["reduction", *(f"_allreduce_{each}_grads" for each in REDUCED)])
def test_an_attempt_that_failed_within_a_reduction_times_nothing(
    within: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: Any, **_keywords: Any) -> None:
        raise EpochEndedError("a rank has failed")

    timers, chunk = Timers(level, "max"), Struck()
    config = SimpleNamespace(timers=timers, barrier_with_L1_time=False)
    outer = timers("forward-backward", log_level=1)
    outer.start()
    finalizing: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    monkeypatch.setattr(finalizing, "get_model_config", lambda _chunk: config)
    for name in (f"_allreduce_{each}_grads" for each in REDUCED):
        monkeypatch.setattr(finalizing, name, fail if name == within else lambda *_given: None)
    if within != "reduction":
        monkeypatch.setattr(chunk, "finish_grad_sync", lambda **_keywords: None)
    groups = SimpleNamespace(tp=None, pp=None, embd=None, pos_embd=None, dp_cp=None)
    attempts = recovery(SimpleNamespace(config=config, model_chunks=[chunk], forward_only=False))
    for number in range(2):
        with pytest.raises(EpochEndedError):
            attempts(lambda *_given: finalizing.finalize_model_grads([chunk], None, pg_collection=groups), number)
    attempts(lambda *_given: None, 2)
    outer.stop()


def test_a_pipeline_is_timed_without_waiting_for_the_device(
    tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    """What is checked stands in timer_ranks.py."""
    plan = tmp_path / "plan.csv"
    plan.write_text(schedule_to_csv(split_backward(stock_order(2, MICRO_BATCHES), None)))
    script = str(Path(__file__).with_name("timer_ranks.py"))
    training = f"--pipeline-model-parallel-size 2 --num-layers 2 --train-iters 3 --global-batch-size {MICRO_BATCHES}"
    start_ranks(2, [script, *training.split(), "--mock-data", "--adaptra-plan-csv", str(plan)], timeout_s=60)


class TestWaiting:
    """A receive that was posted early ends when its sender has got on, which may take this rank to get on."""

    @pytest.fixture
    def time_in_pipeline(self) -> Any:
        applied = enable(AdaptraConfig())
        assert applied.runtime is not None

        def run(action: Callable[[], None], *, in_actions: bool) -> None:
            applied.runtime.runs_actions = in_actions
            action()

        yield run
        applied.undo()

    def test_among_actions_for_computation_alone(self, time_in_pipeline: Any, waits: list[str]) -> None:
        timer = Timer("forward-compute")
        synchronize = torch.cuda.synchronize
        for action in (timer.start, timer.stop, timer.start, timer.elapsed):
            time_in_pipeline(action, in_actions=True)
        assert waits == ["stream"] * 5, "elapsed stops and starts again"
        assert torch.cuda.synchronize is synchronize
        assert timer.active_time() > 0

    def test_elsewhere_as_stock(self, time_in_pipeline: Any, waits: list[str]) -> None:
        timer = Timer("optimizer")
        for action in (timer.start, timer.stop):
            time_in_pipeline(action, in_actions=False)
        assert waits == ["device"] * 2

    def test_an_error_of_a_timer_leaves_torch_as_it_was(self, time_in_pipeline: Any, waits: list[str]) -> None:
        synchronize = torch.cuda.synchronize
        with pytest.raises(AssertionError, match="timer is not started"):
            time_in_pipeline(Timer("forward-compute").stop, in_actions=True)
        assert torch.cuda.synchronize is synchronize
        assert waits == []

    @pytest.mark.parametrize("in_actions", [False, True])
    def test_in_a_call_that_survives_failures_until_one_is_known(
        self, in_actions: bool, waits: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel that waits for a rank which has failed ends once this rank has aborted its communicator."""

        class Event:
            def record(self) -> None:
                waits.append("event")

            def query(self) -> bool:
                return False

        groups = FaultTolerantGroups()
        applied = enable(AdaptraConfig(reroute="failures"), groups=groups)
        try:
            assert applied.runtime is not None
            applied.runtime.runs_actions = in_actions
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "Event", Event)
            groups.ended.set()
            with groups.call(), pytest.raises(EpochEndedError):
                Timer("all-grads-sync").start()
            assert waits == ["event"]
            applied.runtime.runs_actions = False
            Timer("optimizer").start()
            assert waits == ["event", "device"]
        finally:
            applied.undo()
