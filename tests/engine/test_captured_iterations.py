# SPDX-License-Identifier: Apache-2.0
"""Iterations run without graphs in another order than the plan's, and until all ranks capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adaptra_megatron.engine.captured_iterations import CapturedIterations
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.ir import Schedule

STAGE, MICRO_BATCHES, WARMUP = 0, 4, 2
CALL: Any = SimpleNamespace(forward_only=False, stage=STAGE, config=SimpleNamespace(cuda_graph_warmup_steps=WARMUP))


class Layers:
    """CapturedLayers that say what they were asked for."""

    seconds = 0.0

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def suspend(self) -> None:
        self.asked.append("suspend")

    def drop(self) -> None:
        self.asked.append("drop")

    def follow(self, order: Any, *, warm: bool) -> bool:
        self.asked.append(warm)
        return False


def asked(iterations: CapturedIterations, schedule: Schedule, order: Any) -> Any:
    program = SimpleNamespace(schedule=schedule, steps=[SimpleNamespace(action=action) for action in order])
    iterations.choose_work(lambda: SimpleNamespace(program=program), CALL, schedule)  # type: ignore[arg-type, return-value]
    layers: Any = iterations._layers
    return layers.asked[-1]


def test_an_order_other_than_the_plans_runs_without_graphs() -> None:
    schedule = one_f_one_b(2, MICRO_BATCHES)
    planned = schedule.orders[STAGE]
    dispatcher = SimpleNamespace(fixed=False)
    pipeline: Any = SimpleNamespace(
        degraded=False, training_iterations=7, switched=lambda _seconds: None, dispatcher=dispatcher
    )
    iterations = CapturedIterations(pipeline, SimpleNamespace(layers=Layers()))  # type: ignore[arg-type]
    assert dispatcher.fixed
    assert asked(iterations, schedule, planned) is True
    # Routes have the schedule of one pipeline, too, and job-wide numbers of micro-batches.
    routed = [*planned, *(replace_number(action) for action in planned[:2])]
    assert asked(iterations, schedule, routed) == "suspend"
    pipeline.degraded = True
    assert asked(iterations, schedule, planned) == "suspend", "the cells that live would capture, and others not"
    pipeline.degraded = False
    iterations.drop()
    iterations.enter(CALL)
    found = []
    for pipeline.training_iterations in range(7, 11):
        found.append(asked(iterations, schedule, planned))
    assert found == [False] * WARMUP + [True] * 2, "a rank that has rejoined asks for its graphs then"


def replace_number(action: Any) -> Any:
    return action._replace(micro_batch=action.micro_batch + MICRO_BATCHES)
