# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart
from testing.faults import emulated_compute as compute_module
from testing.faults.emulated_compute import EmulatedCompute, EmulationError, parse_compute

F_S, B_S, W_S = 0.02, 0.03, 0.04


class Clock:
    """A thread's time: only sleep makes it pass, whose end is late by `late_s`."""

    def __init__(self) -> None:
        self.now_s, self.late_s = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep_until(self, deadline_s: float) -> None:
        self.now_s = max(self.now_s, deadline_s) + self.late_s

    def check_lasts(self, expected_s: float, function: Any, *args: Any, **keywords: Any) -> None:
        """Twice, apart from each other."""
        for _ in range(2):
            self.now_s += 0.002
            begun_s = self.now_s
            function(*args, **keywords)
            assert self.now_s - begun_s == pytest.approx(expected_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compute_module, "time", clock)
    monkeypatch.setattr(compute_module, "sleep_until", clock.sleep_until)
    return clock


def compute() -> EmulatedCompute:
    return EmulatedCompute(forward_s=(F_S, 2 * F_S), backward_input_s=(B_S,), backward_weight_s=(W_S,))


def test_an_operation_sleeps_for_the_rest_of_its_time() -> None:
    begun_s = time.monotonic()
    compute().lasting(lambda: None, lambda: F_S)()
    assert time.monotonic() - begun_s >= F_S


def test_operation_lasts_its_time_and_keeps_its_result(clock: Clock) -> None:
    emulated = compute()
    operation = emulated.lasting(lambda value: value + 1, lambda value: F_S)
    assert operation(1) == 2
    clock.check_lasts(F_S, operation, 1)
    assert emulated.counts.calls == 3
    assert emulated.counts.overruns == 0


def test_an_action_is_said_to_last_what_it_lasts_now() -> None:
    emulated = dataclasses.replace(compute(), slow_down=lambda: 3.0)
    seconds = [emulated.action_seconds(kind, 1) for kind in "FBIW"]
    assert seconds == pytest.approx([3 * each_s for each_s in (2 * F_S, B_S + W_S, B_S, W_S)])


def test_lateness_of_wake_ups_does_not_add_up(clock: Clock) -> None:
    """A late wake-up shortens the call that follows at once by as much; a call after a pause lasts its whole time."""
    clock.late_s, begun_s = 0.0004, clock.now_s
    operation = compute().lasting(lambda: None, lambda: F_S)
    for _ in range(10):
        operation()
    assert clock.now_s - begun_s == pytest.approx(10 * F_S + clock.late_s)
    clock.now_s += 0.01
    paused_s = clock.now_s
    operation()
    assert clock.now_s - paused_s == pytest.approx(F_S + clock.late_s)


def test_longer_real_work_is_counted_as_overrun(clock: Clock) -> None:
    emulated = compute()
    emulated.lasting(lambda: clock.sleep_until(clock.now_s + 0.02), lambda: 0.005)()
    assert emulated.counts.overruns == 1
    assert emulated.counts.worst_overrun_s == pytest.approx(0.015)


def test_exception_passes_and_leaves_the_next_call_timed(clock: Clock) -> None:
    emulated = compute()
    with pytest.raises(ZeroDivisionError):
        emulated.lasting(lambda: 1 // 0, lambda: 0.0)()
    clock.check_lasts(F_S, emulated.lasting(lambda: None, lambda: F_S))


def test_only_the_outer_of_nested_operations_counts(clock: Clock) -> None:
    emulated = compute()
    inner = emulated.lasting(lambda: None, lambda: 10.0)
    clock.check_lasts(B_S, emulated.lasting(inner, lambda: B_S))


def stock_schedules() -> ModuleType:
    """Functions with the signatures of Megatron 0.16.1's."""

    def forward_step(forward_step_func: Any, model: Any, vp_stage: int | None = None) -> Any:
        return SimpleNamespace(), 0

    def backward_step(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
    ) -> None:
        assert output_tensor is not None

    module = ModuleType("schedules")
    module.forward_step = forward_step  # type: ignore[attr-defined]
    module.backward_step = backward_step  # type: ignore[attr-defined]
    return module


def test_stock_functions_last_the_time_of_their_chunk_until_undone(clock: Clock) -> None:
    schedules: Any = stock_schedules()
    stock = (schedules.forward_step, schedules.backward_step)
    per_chunk = EmulatedCompute(forward_s=(F_S, 2 * F_S), backward_input_s=(B_S, 0.0), backward_weight_s=(W_S, F_S))
    with per_chunk.install_on_stock(schedules):
        clock.check_lasts(F_S, schedules.forward_step, None, None)
        clock.check_lasts(2 * F_S, schedules.forward_step, None, None, vp_stage=1)
        for chunk, expected_s in ((0, B_S + W_S), (1, F_S)):
            output, _ = schedules.forward_step(None, None, vp_stage=chunk)
            clock.check_lasts(expected_s, schedules.backward_step, None, output, None, None, None)
    assert (schedules.forward_step, schedules.backward_step) == stock


def test_computation_lasts_less_when_its_backward_is_split(clock: Clock) -> None:
    class Computation:
        def forward(self, chunk: int, micro_batch: int, input_tensor: Any) -> str:
            return "output"

        def backward(self, chunk: int, micro_batch: int, *tensors: Any, split: bool) -> str:
            return "gradient"

        def weight_gradient(self, chunk: int, micro_batch: int) -> None:
            pass

        def forward_backward(self, forward: ForwardPart, backward: BackwardPart, *sends: Any) -> str:
            for send in sends:
                send(clock.now_s)
            return "output"

    computation: Any = compute().decorate(Computation())  # type: ignore[arg-type]
    assert computation.forward(0, 0, None) == "output"
    assert computation.backward(0, 0, None, None, None, split=True) == "gradient"
    clock.check_lasts(2 * F_S, computation.forward, 1, 0, None)
    clock.check_lasts(B_S, computation.backward, 0, 0, None, None, None, split=True)
    clock.check_lasts(B_S + W_S, computation.backward, 0, 0, None, None, None, split=False)
    clock.check_lasts(W_S, computation.weight_gradient, 0, 0)
    combined: Any = dataclasses.replace(compute(), combined_share=0.75).decorate(Computation())  # type: ignore[arg-type]
    sent_after_s: list[float] = []

    def send(made_s: float) -> None:
        sent_after_s.append(clock.now_s - made_s)

    saved_s = (2 * F_S + B_S + W_S) / 4
    for split, weight_s in ((True, 0.0), (False, W_S)):
        parts = ForwardPart(1, 1, None), BackwardPart(0, 0, None, torch.zeros(()), None, split)
        sent_after_s.clear()
        seconds = 2 * F_S + B_S + weight_s - saved_s
        clock.check_lasts(seconds, combined.forward_backward, *parts, send, send)
        assert sent_after_s == pytest.approx([seconds] * 4), "both messages leave at the end"


def test_short_sequences_last_less(clock: Clock) -> None:
    class Computation:
        def forward(self, chunk: int, micro_batch: int, input_tensor: Any) -> torch.Tensor:
            return torch.zeros(4 * (1 + micro_batch), 1, 8) if input_tensor is None else torch.zeros(())

        def backward(self, chunk: int, micro_batch: int, *tensors: Any, split: bool) -> None:
            pass

        def weight_gradient(self, chunk: int, micro_batch: int) -> None:
            pass

        def forward_backward(self, forward: ForwardPart, backward: BackwardPart, *sends: Any) -> torch.Tensor:
            return self.forward(*forward)

    emulated = dataclasses.replace(compute(), full_length=8)
    first, last = (emulated.decorate(Computation()) for _ in range(2))  # type: ignore[arg-type]
    for micro_batch, share in ((0, 0.5), (1, 1.0)):
        clock.check_lasts(share * F_S, first.forward, 0, micro_batch, None)
        clock.check_lasts(share * F_S, last.forward, 0, micro_batch, torch.zeros(4 * (1 + micro_batch), 1, 8))
        clock.check_lasts(share * B_S, last.backward, 0, micro_batch, None, None, None, split=True)
        clock.check_lasts(share * W_S, first.weight_gradient, 0, micro_batch)
    both = emulated.decorate(Computation())  # type: ignore[arg-type]
    parts = ForwardPart(0, 0, None), BackwardPart(0, 1, None, torch.zeros(()), None, True)
    clock.check_lasts(F_S / 2 + B_S, both.forward_backward, *parts, print, print)


def test_parsing() -> None:
    for stage in range(2):
        parsed = parse_compute("20,30,10", stage=stage, stages=2)
        assert parsed.forward_s == (0.02,)
        assert parsed.backward_seconds() == pytest.approx(0.04)
        assert parsed.backward_seconds(split=True) == pytest.approx(0.03)
    assert parse_compute("1,2,3;4,5,6", stage=1, stages=2).forward_s == (0.004,)
    assert parse_compute("1,2,3,0.8", stage=1, stages=2).combined_share == 0.8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,2", "is not F,B,W"),
        ("1,2,x", "is not F,B,W"),
        ("1,2,3,4,5", "is not F,B,W"),
        ("1,2,3;1,2,3", "2 triples"),
        ("1,2,-3", "below 0"),
    ],
)
def test_wrong_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(EmulationError, match=reason):
        parse_compute(text, stage=0, stages=3)
