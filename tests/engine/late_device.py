# SPDX-License-Identifier: Apache-2.0
"""A rank of a training whose device is late, as a GPU is: `late_device.py OUTPUT TRAINING_ARGUMENTS...`.

What its actions did is over only once it is asked for the second time. Rank 0 leaves in OUTPUT what happened, in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from testing.megatron.megatron_on_cpu import install

install(with_fused_weight_gradient=True)

import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)

from adaptra_megatron.control import exchange  # noqa: E402
from adaptra_megatron.engine import (  # noqa: E402
    pipeline,
    runtime,
)
from adaptra_megatron.engine.execution import executor  # noqa: E402
from adaptra_megatron.engine.execution.executor import ClockTimer  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402
from testing.training.process_groups import leave_job  # noqa: E402
from testing.training.train import train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402


class LateTimer(ClockTimer):
    """Tells times, and what it was asked."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self._asked: list[Any] = []

    def over(self, marks: list[float]) -> bool:
        if any(marks is each for each in self._asked):
            return True
        self._asked.append(marks)
        return False

    def resolve(self, marks: list[float]) -> list[float]:
        self._happened.append("resolve")
        return super().resolve(marks)


def main(output: Path, arguments: list[str]) -> None:
    happened: list[str] = []
    run, finalize, post = executor.PipelineExecutor.run, runtime.finish_gradients, exchange.PlanExchange.post

    def noted_run(*args: Any, **keywords: Any) -> Any:
        happened.append("run")
        return run(*args, **keywords)

    def noted_finalize(*args: Any, **keywords: Any) -> None:
        happened.append("finalize")
        finalize(*args, **keywords)

    def noted_post(self: exchange.PlanExchange, iteration: int, measurement: Any) -> None:
        assert measurement.iteration == iteration
        happened.append(f"post {iteration}")
        post(self, iteration, measurement)

    stand_ins = [
        Replacement(pipeline, "make_timer", lambda clock: LateTimer(happened), "a late device"),
        Replacement(executor.PipelineExecutor, "run", noted_run, "what happens when"),
        Replacement(runtime, "finish_gradients", noted_finalize, "what happens when"),
        Replacement(exchange.PlanExchange, "post", noted_post, "what happens when"),
    ]
    with Replaced(stand_ins):
        result = train(parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments]))
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"happened": happened, "plans": result.plans, "losses": result.losses}))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
