# SPDX-License-Identifier: Apache-2.0
"""Define the form of a feature that takes part in iterations: the engine calls these methods and knows no feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptra_megatron.schedule.ir import Schedule

if TYPE_CHECKING:
    from adaptra_megatron.engine.execution.executor import IterationReport
    from adaptra_megatron.engine.measurement.measuring import EndedIteration
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.engine.training_job import Job
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall
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


class IterationHooks:
    """One feature's part in the iterations of one pipeline, on one rank. Lives as long as the pipeline.

    Methods do nothing, or return what they are given, unless a feature overrides them. Features are called in the order
    of their list, so that the wrapper of the last one is outermost.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: the one that is being made, whose members are there but for its executor."""
        self.pipeline = pipeline

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return the transport by which the pipeline's messages go."""
        return transport

    def carry_out(self, attempt: Attempt, call: PipelineCall) -> Attempted:
        """Run the iteration of `call` by `attempt`, once or until its result counts; return that result."""
        return attempt(call, 0)

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """Return the computation of an attempt at the iteration of `call`."""
        return computation

    def commit(self, call: PipelineCall) -> None:
        """Act once the iteration of `call` will not be attempted again; all of it has been launched."""

    def measured(self, ended: EndedIteration) -> None:
        """Use what a training iteration measured: on a GPU when the next one begins, or the pipeline is closed."""

    def close(self) -> None:
        """End threads and files: the pipeline has ended."""


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

    def hooks(self, pipeline: Pipeline, call: PipelineCall) -> IterationHooks:
        """Return the feature's hooks for a new pipeline, whose first call is `call`."""
        return self._hooks(pipeline)

    def stock_hooks(self, job: Job, telemetry: RunTelemetry) -> StockHooks:
        """Return the feature's hooks where stock's own schedule runs."""
        return StockHooks()

    def iterate(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Carry out one call of Megatron's forward_backward function by `run`, which has these `arguments`, with a
        pipeline or with stock's own schedule; return its result."""
        return run()

    def settle(self) -> None:
        """Make parameters and optimizer what they are in stock at this point. Collective over the job."""

    def summary(self) -> Mapping[str, Any]:
        """Return what ran, for reports and tests: plain numbers and text."""
        return {}

    def close(self) -> None:
        """End threads."""
