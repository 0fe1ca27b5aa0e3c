# SPDX-License-Identifier: Apache-2.0
"""A rank of benchmarks/overhead.py: `overhead_rank.py REQUEST REPORT`; the request is JSON (`overhead.Request`).

Trains with everything measured and with nothing measured, in turn. Nothing: the same plan from a file, and decorated
away are the executor's timer, its records, the transport's times of messages, what ranks hand in and decisions.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testing.megatron.megatron_on_cpu import install

install(with_fused_weight_gradient=True)

import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)

from adaptra_megatron.control import exchange  # noqa: E402
from adaptra_megatron.control.decisions import Decision  # noqa: E402
from adaptra_megatron.control.sidecar import planner_client as keeper  # noqa: E402
from adaptra_megatron.engine import dispatch, measuring, pipeline  # noqa: E402
from adaptra_megatron.engine.execution import executor  # noqa: E402
from adaptra_megatron.engine.execution import executor as timers  # noqa: E402
from adaptra_megatron.transport.single_path import gloo_transport  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402
from testing.training.process_groups import leave_job  # noqa: E402
from testing.training.train import train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402

MODES = ("nothing", "everything")
SKIPPED = 3
"""Iterations at the beginning of each training that do not count: plans, threads and caches begin there."""


class NoTimer(timers.ClockTimer):
    """Marks nothing."""

    def mark(self) -> float:
        return 0.0


@contextlib.contextmanager
def nothing_measured() -> Iterator[None]:
    reason = "benchmark: nothing is measured"
    with Replaced(
        [
            Replacement(pipeline, "make_timer", lambda clock: NoTimer(), reason),
            Replacement(executor.PipelineExecutor, "_records", lambda *values: [], reason),
            Replacement(measuring.Measuring, "hand_in", lambda *values: None, reason),
            Replacement(exchange.PlanExchange, "decision", lambda plans, iteration: Decision(0).kept(), reason),
            Replacement(dispatch.Dispatcher, "ran", lambda *values: None, reason),
            Replacement(measuring, "arrival_records", lambda stage, received: [], reason),
            Replacement(gloo_transport, "MessageTimes", lambda *values: None, reason),
        ]
    ):
        yield


class Spent:
    """Seconds of calls, by decorating functions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: of the thread's CPU time, or of all time."""
        self.seconds: dict[str, list[float]] = {}
        """By name of the function."""
        self._clock = clock

    def medians_s(self) -> dict[str, float]:
        """Median seconds of a call, by name of the function. The first calls do not count."""
        return {name: statistics.median(seconds[SKIPPED:]) for name, seconds in self.seconds.items()}

    def timed(self, owner: Any, name: str) -> Replacement:
        function = getattr(owner, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            begun_s = self._clock()
            result = function(*args, **keywords)
            self.seconds.setdefault(name, []).append(self._clock() - begun_s)
            return result

        return Replacement(owner, name, timed, "benchmark: timed")


@contextlib.contextmanager
def everything_measured(deciding: Spent, training: Spent) -> Iterator[None]:
    """`deciding`: of the leader's thread. `training`: of the training thread, at the end and the start of iterations;
    its marks around actions and its notes of messages are too short to be timed here."""
    with Replaced(
        [
            deciding.timed(keeper.PlannerClient, "decide"),
            training.timed(executor.PipelineExecutor, "_records"),
            training.timed(measuring.Measuring, "hand_in"),
            training.timed(exchange.PlanExchange, "decision"),
        ]
    ):
        yield


def run(mode: str, request: dict[str, Any]) -> dict[str, Any]:
    """One training."""
    arguments = parse_arguments(
        ["--emulate-cpu", "--distributed-backend", "gloo", *request["arguments"], *request[mode]]
    )
    gc.collect()
    deciding, training = Spent(time.thread_time), Spent(time.perf_counter)
    with nothing_measured() if mode == "nothing" else everything_measured(deciding, training):
        begun_cpu_s = time.process_time()
        result = train(arguments)
        cpu_s = time.process_time() - begun_cpu_s
    spans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spans, result.forward_backward_s)
    pipeline_s = [max(end for _, end in ranks) - ranks[0][0] for ranks in zip(*spans, strict=True)]
    return {
        "mode": mode,
        "iteration_s": result.iteration_seconds[SKIPPED:],
        "pipeline_s": pipeline_s[SKIPPED:],
        "cpu_s_per_iteration": cpu_s / len(result.iteration_seconds),
        "deciding_cpu_s": deciding.medians_s().get("decide"),
        "training_thread_s": training.medians_s(),
        "losses": result.losses,
    }


def main(request: dict[str, Any], report: Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    found = []
    for number in range(request["rounds"]):
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            found.append(run(mode, request))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(gathered))
    leave_job()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
