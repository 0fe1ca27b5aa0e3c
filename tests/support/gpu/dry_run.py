# SPDX-License-Identifier: Apache-2.0
"""Every check of gpu_check on stand-ins: that a command on a GPU will not be lost to a mistake in its own steps."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_check import t1_queues, t2_host_calls, t4_stream_path, t5_sessions
from gpu_check.findings import Report
from gpu_check.gpu import Point, Stream
from gpu_check.plan import QUEUES
from gpu_check.watchdog import Check
from support.gpu.gpu_stand_in import CpuTrainer, ModelledGpu, ModelledPoint, StageOnSimulation
from support.gpu.simulated_pipeline import ProcessEndedError, SimulatedStage, play

from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path import nccl_transport
from testing.megatron.megatron_on_cpu import install

TESTS = Path(__file__).parents[2]
HERE = "support.gpu.dry_run"
BY_SIMULATION = ("gpu_check.t2_sessions", "gpu_check.t4_stream_path", "gpu_check.t5_sessions")
BY_PROCESSES = {"paths", "one_gpu", "stalls", "throughput"}
"""Parts that two processes run over gloo, without a GPU."""


def on_stand_ins(check: Check) -> Check:
    """The same check, on what stands in for its machine."""
    part = check.arguments[0] if check.arguments else ""
    here = {**check.environment, "PYTHONPATH": str(TESTS)}
    changed = dataclasses.replace(check, environment=here, ends_within_s=None, needs=())
    if check.module == "gpu_check.first" or check.machine.endswith(":CudaGpu"):
        return dataclasses.replace(changed, machine=f"{HERE}:modelled")
    if part in BY_PROCESSES:
        return dataclasses.replace(changed, machine="support.gpu.gpu_stand_in:CpuStage")
    if check.module in BY_SIMULATION or part == "ring":
        module, ranks = check.module, check.ranks
        arguments = (module.rpartition(".")[2], part, str(ranks))
        return dataclasses.replace(changed, module=HERE, machine="builtins:object", ranks=1, arguments=arguments)
    if check.module == "gpu_check.t7_training":
        return dataclasses.replace(changed, machine=f"{HERE}:trainer", ranks=2)
    return changed


class Modelled(ModelledGpu):
    """With what the first questions ask. A full queue and a capture are made up."""

    def default_streams(self, count: int) -> list[Stream]:
        """As others: the model has no priorities."""
        return self.link_streams(count)

    def record(self, stream: Stream, *, timed: bool = False, blocking: bool = False) -> Point:
        """On a link's stream an event that tells no time is none of the work that stands in the queue."""
        if timed or stream == self.compute:
            return super().record(stream)
        number = next(
            n for n in range(len(self._program) - 1, -1, -1) if getattr(self._program[n], "stream", 0) == stream
        )
        return ModelledPoint(self, number)

    def fill(self) -> int:
        """As many as a queue takes."""
        return 1000

    def calls_when_full(self) -> Mapping[str, Callable[[], Any]]:
        """One that returns and one that does not."""
        return {"a query": lambda: None, "cudaHostAlloc": threading.Event().wait}

    def captured_with_thread(self, ours: bool) -> str | None:
        """Threads of ours spoil none."""
        return None if ours else "operation not permitted when stream is capturing"

    def costs_us(self) -> Mapping[str, float]:
        """Made up."""
        return {"query": 1.0}


def modelled() -> Modelled:
    """With as many queues as the driver would have."""
    t1_queues.HELD_S = 0.002
    t2_host_calls.RETURNS_S = 0.5
    queues = int(os.environ.get(QUEUES, "8"))
    return Modelled(queues if queues == 1 else 10_000)


def trainer() -> CpuTrainer:
    """With Megatron on the CPU."""
    install()
    return CpuTrainer()


def run(_machine: object, report: Report, module: str, part: str, ranks: str) -> None:
    """A check of two stages, in threads of this process."""
    t4_stream_path.ROUNDS, t4_stream_path.NEAR_S, t4_stream_path.PATIENCE_S = 5, 0.5, 0.3
    t5_sessions.SESSIONS, t5_sessions.SETTLED, t5_sessions.MADE_S = 6, 2, 6.0
    nccl_transport.GRACE_S = 0.2
    check: Any = import_module(f"gpu_check.{module}")

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> None:
        arguments = () if part == "" else (part,)
        check.run(StageOnSimulation(stage, rendezvous), report, *arguments)

    for result in play(int(ranks), program):
        meant = part in ("error", "death")
        if isinstance(result, Exception) and not (meant and isinstance(result, RuntimeError | ProcessEndedError)):
            raise result
    if not report.read().findings:
        report.show(f"{module}, {part} ends", "all stages ended", True)
