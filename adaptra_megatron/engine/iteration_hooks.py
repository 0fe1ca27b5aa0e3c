# SPDX-License-Identifier: Apache-2.0
"""Define the form of a feature that takes part in iterations: the engine calls these methods and knows no feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptra_megatron.schedule.ir import Schedule

if TYPE_CHECKING:
    import torch

    from adaptra_megatron.control.decisions import Decision
    from adaptra_megatron.engine.execution.executor import IterationReport
    from adaptra_megatron.engine.iteration_work import Work
    from adaptra_megatron.engine.measurement.measuring import EndedIteration
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.engine.training_job import Job, JobEntry
    from adaptra_megatron.megatron.computation import Input, StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.telemetry.figures.scalars import RankFigures
    from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
    from adaptra_megatron.transport.message_keys import Transport


class Attempted(NamedTuple):
    """Result of an attempt at an iteration."""

    report: IterationReport
    schedule: Schedule
    losses: list[Any]
    """Those that the training script gets."""


Attempt = Callable[["PipelineCall", int], Attempted]
"""Runs all of an iteration, given its call and the number of the attempt."""


Inputs = Callable[[int, int], "Input"]
"""Return what the next forward of a chunk and micro-batch gets."""


class IterationHooks:
    """One feature's part in the iterations of one pipeline, on one rank. Lives as long as the pipeline.

    Methods do nothing, or return what they are given, unless a feature overrides them. Features are called in the order
    of their list, so that the wrapper of the last one is outermost. What wraps a value and what surrounds a step have a
    method each, so that the engine asks no feature whether it is there. Work is chosen, not a schedule: routed work is
    that of one rank, and no schedule of its pipeline.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: the one that is being made. It has job, transport, plans and exchange, and no executor yet."""
        self.pipeline = pipeline

    # Of a pipeline.

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return the transport by which the pipeline's messages go."""
        return transport

    def made(self, call: PipelineCall) -> None:
        """Set up what needs the whole pipeline, before its first `call`. Collective over the job's ranks."""

    def follow(self, decision: Decision) -> None:
        """Do as was decided, before the first iteration for which it holds."""

    def close(self) -> None:
        """End threads and files: the pipeline's links and exchange have ended."""

    # Of an iteration, in this order.

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """Run the iteration of `call` by `attempt`, once or until its result counts; return that result. `number`: of
        the attempt, which no other at this iteration has."""
        return attempt(call, number)

    def wrap_inputs(self, call: PipelineCall, inputs: Inputs) -> Inputs:
        """Return the inputs that an attempt reads micro-batches from."""
        return inputs

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """Return the computation of an attempt."""
        return computation

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        """Return what an attempt runs on this rank; `work` makes what `schedule` has it run."""
        return work()

    def finish(self, finish: Callable[[], None], call: PipelineCall, tokens: torch.Tensor) -> None:
        """Have the gradients of an attempt at a training iteration reduced, by `finish`. `tokens`: of the micro-batches
        that were computed here, then of all that gradients are divided by."""
        finish()

    def wrap_losses(self, call: PipelineCall, losses: list[Any]) -> list[Any]:
        """Return what the training script gets of the `losses` that an attempt has computed here."""
        return losses

    def commit(self, call: PipelineCall) -> None:
        """Act once the iteration will not be attempted again; all of it has been launched."""

    def wrap_figures(self, figures: RankFigures) -> RankFigures:
        """Return the figures of a training iteration that telemetry gets."""
        return figures

    def end(self, call: PipelineCall) -> None:
        """Act once telemetry has the iteration's figures."""

    def measured(self, ended: EndedIteration) -> None:
        """Use what a training iteration measured: on a GPU when the next one begins, or the pipeline is closed."""

    # Of an iteration that fails.

    def fail(self, cause: BaseException) -> None:
        """Act on the error of an iteration, before links are ended."""

    def failed(self) -> None:
        """Wait, once links have ended, for what is to end before this process."""


class StockHooks:
    """One feature's part in iterations that stock's own schedule runs, on one rank."""

    def end(self, iteration: int, seconds: float) -> None:
        """Act once a training iteration has taken `seconds`. `iteration`: its number, evaluations counted."""

    def close(self) -> None:
        """End threads and files."""


class EngineFeature:
    """One feature's part in a process, made when patches are applied. Lives as long as they do."""

    def __init__(self, hooks: Callable[[Pipeline], IterationHooks] = IterationHooks) -> None:
        """`hooks`: of a feature that is no more than these, their class."""
        self._hooks = hooks

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        """Return the feature's hooks for a new pipeline."""
        return self._hooks(pipeline)

    def stock_hooks(self, job: Job, telemetry: RunTelemetry) -> StockHooks:
        """Return the feature's hooks where stock's own schedule runs."""
        return StockHooks()

    def wrap_entry(self, entry: JobEntry) -> JobEntry:
        """Return how the next pipeline comes into its job."""
        return entry

    def iterate(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Carry out one call of Megatron's forward_backward function by `run`, which has these `arguments`, with a
        pipeline or with stock's own schedule; return its result."""
        return run()

    def save(self, write: Callable[[], Any]) -> Any:
        """Have `write`, which is collective over the job, write a checkpoint; return its result."""
        return write()

    def settle(self) -> None:
        """Make parameters and optimizer what they are in stock at this point. Collective over the job."""

    def summary(self) -> Mapping[str, Any]:
        """Return what ran, for reports and tests: plain numbers and text."""
        return {}

    def close(self) -> None:
        """End threads."""
