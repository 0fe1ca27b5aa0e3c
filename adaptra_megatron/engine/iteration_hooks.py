# SPDX-License-Identifier: Apache-2.0
"""Define the interface of features that take part in iterations: the engine calls these methods and knows no
feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from adaptra_megatron.schedule.ir import Schedule

if TYPE_CHECKING:
    import torch

    from adaptra_megatron.control.decisions import Decision
    from adaptra_megatron.engine.execution.executor import IterationReport
    from adaptra_megatron.engine.iteration_work import Work
    from adaptra_megatron.engine.measuring import EndedIteration
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.engine.training_job import Job, JobEntry
    from adaptra_megatron.megatron.computation import Input, StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
    from adaptra_megatron.telemetry.scalars import RankFigures
    from adaptra_megatron.transport.message_keys import Transport


class Attempted(NamedTuple):
    """Result of an attempt at an iteration."""

    report: IterationReport
    schedule: Schedule
    losses: list[Any]
    """Losses that the training script gets."""


Attempt = Callable[["PipelineCall", int], Attempted]
"""Runs all of an iteration, given its call and the number of the attempt."""


Inputs = Callable[[int, int], "Input"]
"""Returns the input of the next forward, of a chunk and micro-batch."""


class IterationHooks:
    """Hooks of one feature into the iterations of one pipeline, on one rank. They exist as long as the pipeline.

    Methods do nothing, or return their argument, unless a feature overrides them. Features are called in the order of
    their list, so that the wrapper of the last one is outermost. There is a method for each wrapped value and for each
    step that can be surrounded, so that the engine never asks whether a feature is on. `choose_work` returns the work
    of one rank rather than a schedule, since routed work does not follow a schedule of the rank's own pipeline.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: under construction. It has model, job, transport, plans and exchange, but no executor yet."""
        self.pipeline = pipeline

    # Of a pipeline.

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return the transport for the pipeline's messages."""
        return transport

    def made(self, call: PipelineCall) -> None:
        """Set up state that needs the whole pipeline, before its first `call`. Collective over the job's ranks."""

    def follow(self, decision: Decision) -> None:
        """Apply a decision, before the first iteration for which it holds."""

    def close(self) -> None:
        """End threads and files. The pipeline's links and exchange have ended already."""

    # Of an iteration, in this order.

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """Run the iteration of `call` by `attempt`, once or until its result counts; return that result.

        `number`: of the attempt, unique for this iteration.
        """
        return attempt(call, number)

    def wrap_inputs(self, call: PipelineCall, inputs: Inputs) -> Inputs:
        """Return the inputs that an attempt reads micro-batches from."""
        return inputs

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """Return the computation of an attempt."""
        return computation

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        """Return the work of an attempt on this rank. `work` makes that of `schedule`."""
        return work()

    def finish(self, finish: Callable[[], None], call: PipelineCall, tokens: torch.Tensor) -> None:
        """Reduce the gradients of an attempt at a training iteration, by `finish`.

        `tokens`: number in the micro-batches computed here; after `finish`, the number that all gradients are divided
        by.
        """
        finish()

    def wrap_losses(self, call: PipelineCall, losses: list[Any]) -> list[Any]:
        """Return the losses for the training script. `losses`: those that the attempt computed here."""
        return losses

    def commit(self, call: PipelineCall) -> None:
        """Act after the iteration has committed: all of its work has been launched, and it will not be
        attempted again.
        """

    def wrap_figures(self, figures: RankFigures) -> RankFigures:
        """Return the figures of a training iteration for telemetry."""
        return figures

    def end(self, call: PipelineCall) -> None:
        """Act once telemetry has the iteration's figures."""

    def measured(self, ended: EndedIteration) -> None:
        """Use the measurements of a training iteration. On a GPU they come when the next one begins, or the pipeline is
        closed.
        """

    # Of an iteration that fails.

    def fail(self, cause: BaseException) -> None:
        """Act on the error of an iteration, before links are closed."""

    def failed(self) -> None:
        """Wait, once links are closed, for processes that must end before this one."""


class StockHooks:
    """Hooks of one feature into iterations that stock's own schedule runs, on one rank."""

    def end(self, iteration: int, seconds: float) -> None:
        """Act after a training iteration that took `seconds`. `iteration`: its number, with evaluations counted."""

    def close(self) -> None:
        """End threads and files."""


class EngineFeature:
    """A feature in one process. Created when patches are applied, and lives as long as they do."""

    def __init__(self, hooks: Callable[[Pipeline], IterationHooks] = IterationHooks) -> None:
        """`hooks`: class of the feature's hooks, for a feature without further state."""
        self._hooks = hooks

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        """Return the feature's hooks for a new pipeline."""
        return self._hooks(pipeline)

    def stock_hooks(self, job: Job, telemetry: RunTelemetry) -> StockHooks:
        """Return the feature's hooks for iterations that stock's own schedule runs."""
        return StockHooks()

    def wrap_entry(self, entry: JobEntry) -> JobEntry:
        """Return the entry by which the next pipeline joins its job."""
        return entry

    def iterate(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Run one call of Megatron's forward_backward function by `run`; return its result.

        `arguments`: of that call. `run` uses a pipeline, or stock's own schedule.
        """
        return run()

    def save(self, write: Callable[[], Any], context: dict[str, Any]) -> Any:
        """Write a checkpoint by `write`, which is collective over the job; return its result.

        `context`: Megatron's checkpointing context, which keeps plans from one save to the next.
        """
        return write()

    def settle(self) -> None:
        """Make parameters and optimizer state equal stock's at this point. Collective over the job."""

    def summary(self) -> Mapping[str, Any]:
        """Return counters and settings of the run, for reports and tests: plain numbers and text."""
        return {}

    def close(self) -> None:
        """End threads."""


Hooks = TypeVar("Hooks", IterationHooks, EngineFeature)


def overriding(hooks: Iterable[Hooks], method: Callable[..., Any]) -> Iterator[Hooks]:
    """Return the hooks whose class overrides `method` of its base class. A step is surrounded by these alone: all
    others would be frames in every traceback of the step.
    """
    return (each for each in hooks if getattr(type(each), method.__name__) is not method)
