# SPDX-License-Identifier: Apache-2.0
"""What our runtime calls on a GPU, recorded stage by stage from the real PipelineExecutor, Inbox and GradientSync.

Only what is below them is replaced: the transport, the computation, and Megatron's data parallelism. The transport
does what one over NCCL does with its calls: each directed link has a communicator of its own and a stream at either
end; a receive waits for what the current stream has by then, a send too; `wait` makes the current stream wait. Where
sizes vary a header goes first, on the same stream, and the host that posts a receive waits for that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.device_model.calls import Communicator, Program, Transfer
from support.device_model.recording import Recorder

from adaptra_megatron.engine.execution import executor
from adaptra_megatron.engine.execution.executor import ActivationAccount, IterationReport, PipelineExecutor
from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import compile_program
from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, Send
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import MessageKey, TensorSpecification

CPU = torch.device("cpu")
HEADER_S = 1e-9
OPTIMIZER_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What a job runs in one iteration."""

    schedule: Schedule
    costs: Costs
    """What it takes."""
    planned_for: Costs | None = None
    """What launch orders are made from."""
    training: bool = True
    reduction: str | None = None
    """How gradients of replicas are reduced: overlapped with backwards, final, or None."""
    synchronized: bool = False
    """True if the host waits for its device at the end."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Iterations in a row."""

    iterations: tuple[Iteration, ...]
    replicas: int = 1
    sizes_vary: bool = False
    inbox: Callable[..., Inbox] = Inbox
    marks: bool = False
    """True if events that tell the time are on the compute stream between actions, and around posts and waits."""

    def record(self, stage: int) -> Program:
        """All calls of one rank of `stage`; replicas call the same."""
        recorder = Recorder()
        costs, vary = self.iterations[0].costs, self.sizes_vary
        transport = RecordingTransport(recorder, stage, costs, sizes_vary=vary, marks=self.marks)
        runner = PipelineExecutor(transport, RecordingTimer(recorder, marks=self.marks), timeout_s=1.0)
        with mock.patch.multiple(executor, current_device=lambda: CPU, Inbox=self.inbox):
            report: IterationReport | None = None
            for number, iteration in enumerate(self.iterations):
                transport.costs = iteration.costs
                if report is not None:
                    report.resolve()  # by then, when the device has not come to its end before
                report = _record_iteration(recorder, runner, stage, self.replicas, number, iteration, self.sizes_vary)
        return recorder.program


def _record_iteration(
    recorder: Recorder,
    runner: PipelineExecutor,
    stage: int,
    replicas: int,
    number: int,
    iteration: Iteration,
    sizes_vary: bool,
) -> IterationReport:
    schedule = iteration.schedule
    reductions = Reductions(recorder, replicas, iteration)
    call = SimpleNamespace(
        stage=stage,
        config=reductions.config,
        model_chunks=reductions.model_chunks,
        message_shape=(1,),
        forward_only=not iteration.training,
        interleaved=schedule.chunks > 1,
        chunks=schedule.chunks,
    )
    computation = RecordingComputation(recorder, stage, number, iteration.costs, reductions)
    report = runner.run(
        call,  # type: ignore[arg-type]
        computation,
        compile_program(schedule, stage, iteration.planned_for, sizes_known=not sizes_vary),
        addresses=Addresses(range(schedule.stages), number),
        account=ActivationAccount(stage, None, 0.0),
    )
    if iteration.training:
        reductions.finalize(stage, schedule.stages)
        recorder.compute(OPTIMIZER_S)
        recorder.host_wait_for_stream()  # for the norm of the gradient
    if iteration.synchronized:
        recorder.device_wait()
    return report


class RecordingTransport:
    """Implements Transport. Says of no arrival that it sees it."""

    def __init__(self, recorder: Recorder, stage: int, costs: Costs, *, sizes_vary: bool, marks: bool = False) -> None:
        self.costs, self._marks = costs, marks
        self._recorder, self._stage, self._sizes_vary = recorder, stage, sizes_vary
        self._received: dict[MessageKey, int] = {}
        self._sent: list[int] = []
        self._tensor = torch.zeros(1)

    def describe(self, specification: TensorSpecification) -> None:
        """Note nothing: shapes change no order."""

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """Behind what is on the current stream."""
        stage = self._stage
        if self._sizes_vary:
            self._transfer(stage, peer, f"header of {key}", f"to {peer}", HEADER_S)
        self._sent.append(self._transfer(stage, peer, key, f"to {peer}"))

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Behind what is on the current stream, although nothing there uses what is received into."""
        if self._sizes_vary:
            header = self._transfer(peer, self._stage, f"header of {key}", f"from {peer}", HEADER_S)
            self._recorder.host_wait(header)
        self._mark()
        self._received[key] = self._transfer(peer, self._stage, key, f"from {peer}")

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """The current stream waits."""
        self._mark()
        self._recorder.make_wait(self._received.pop(key))
        self._mark()
        return self._tensor

    def flush(self, deadline_s: float) -> None:
        """The current stream waits."""
        for work in self._sent:
            self._recorder.make_wait(work)
        self._sent.clear()

    def can_poll(self, peer: int) -> bool:
        return False

    def ready(self, key: MessageKey) -> bool:
        raise AssertionError("arrivals cannot be seen")

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        raise AssertionError("arrivals cannot be seen")

    def last_receive_path(self, peer: int) -> Path:
        return Path.DEVICE

    def take_times(self) -> Any:
        return (), ()

    def close(self) -> None:
        """Release nothing."""

    def _mark(self) -> None:
        if self._marks:
            self._recorder.mark()

    def _transfer(self, source: int, target: int, message: object, stream: str, seconds: float | None = None) -> int:
        cost = self.costs.link(source, target)
        if seconds is None:
            seconds = cost.occupancy_s + cost.latency_s
        return self._recorder.transfer(f"{source}>{target}", stream, Transfer(source, target, message, seconds))


class RecordingComputation:
    """Implements StageComputation."""

    def __init__(self, recorder: Recorder, stage: int, iteration: int, costs: Costs, reductions: Reductions) -> None:
        self._recorder, self._stage, self._iteration = recorder, stage, iteration
        self._costs, self._reductions = costs, reductions
        self._tensor = torch.zeros(1)

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """One action."""
        self._compute(Kind.FORWARD, chunk, micro_batch, self._costs.forward_s)
        return self._tensor

    def backward(self, chunk: int, micro_batch: int, *tensors: torch.Tensor | None, split: bool) -> torch.Tensor:
        """One action, or two halves with what the hooks of the model's gradients begin between them."""
        if split:
            self._compute(Kind.BACKWARD_INPUT, chunk, micro_batch, self._costs.backward_input_s)
        elif self._reductions.by_hooks():
            seconds = self._costs.whole_backward_s[self._stage][chunk] / 2
            self._recorder.compute(seconds)
            self._reductions.begin(chunk)
            self._recorder.compute(seconds, self._label(Kind.BACKWARD, chunk, micro_batch))
        else:
            self._compute(Kind.BACKWARD, chunk, micro_batch, self._costs.whole_backward_s)
        return self._tensor

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        """One action."""
        self._compute(Kind.BACKWARD_WEIGHT, chunk, micro_batch, self._costs.backward_weight_s)

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        """Both actions, and then their messages."""
        output = self.forward(*forward)
        gradient = self.backward(*backward[:-1], split=backward.split)
        send_output(output)
        send_gradient(gradient)
        return output

    def _compute(self, kind: Kind, chunk: int, micro_batch: int, table: Sequence[Sequence[float]]) -> None:
        self._recorder.compute(table[self._stage][chunk], self._label(kind, chunk, micro_batch))

    def _label(self, kind: Kind, chunk: int, micro_batch: int) -> tuple[int, Action]:
        return self._iteration, Action(self._stage, kind, chunk, micro_batch)


class Reductions:
    """Stands in for Megatron's DistributedDataParallel of all chunks of a rank, with one bucket per chunk."""

    def __init__(self, recorder: Recorder, replicas: int, iteration: Iteration) -> None:
        self._recorder, self._replicas = recorder, replicas
        self._overlapped = replicas > 1 and iteration.reduction == "overlapped"
        self._final = replicas > 1 and iteration.reduction == "final"
        self._off = 0
        self._begun: list[int] = []
        self._gradients, self._embedding = Communicator("gradients", of_stage=True), Communicator("embedding")
        self._ends = 2
        """Members of the embedding's communicator."""
        self.config = SimpleNamespace(
            no_sync_func=self._no_sync,
            grad_sync_func=None,
            param_sync_func=None,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=False,
        )
        self.model_chunks: list[Any] = [self._model(chunk) for chunk in range(iteration.schedule.chunks)]

    def by_hooks(self) -> bool:
        """Return whether a backward begins the reduction now."""
        return self._overlapped and not self._off

    def begin(self, chunk: int) -> None:
        """Begin the reduction of one chunk."""
        self._begun.append(self._recorder.collective(self._gradients, self._replicas, 1e-3))

    def finalize(self, stage: int, stages: int) -> None:
        """As finalize_model_grads: the rest of the reductions, and the embedding's of first and last stage."""
        if self._final:
            for chunk in range(len(self.model_chunks)):
                self.begin(chunk)
        for work in self._begun:
            self._recorder.make_wait(work)
        if stage in (0, stages - 1):
            self._recorder.make_wait(self._recorder.collective(self._embedding, self._ends, 1e-3))

    def _model(self, chunk: int) -> Any:
        return SimpleNamespace(
            ddp_config=SimpleNamespace(overlap_grad_reduce=self._overlapped),
            start_grad_sync=lambda: self.begin(chunk),
        )

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._off += 1
        yield
        self._off -= 1


class RecordingTimer:
    """Implements ActionTimer: resolving waits for the last mark."""

    def __init__(self, recorder: Recorder, *, marks: bool) -> None:
        self._recorder, self._marks = recorder, marks

    def mark(self) -> None:
        """An event."""
        if self._marks:
            self._recorder.mark()

    def over(self, marks: list[Any]) -> bool:
        """The device is behind."""
        return False

    def resolve(self, marks: list[Any]) -> list[float]:
        """Waits as CudaEventTimer does."""
        self._recorder.host_wait_for_stream()
        return [0.0] * len(marks)
