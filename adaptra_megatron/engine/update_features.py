# SPDX-License-Identifier: Apache-2.0
"""Features that change when parameters are updated, and by which replicas. Each imports its part only once created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.iteration_hooks import Attempt, Attempted, EngineFeature, IterationHooks
from adaptra_megatron.megatron.feature_refusals import refuse_for_staggering

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.megatron.staggered_optimizer import StaggeredOptimizer


class StaggeredSteps(EngineFeature):
    """Optimizer steps that do not wait for the slowest stage."""

    def __init__(self) -> None:
        from adaptra_megatron.megatron.staggered_optimizer import StaggeredOptimizer

        super().__init__()
        self.optimizer = StaggeredOptimizer()

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        return StaggeredIterations(pipeline, self.optimizer)

    def settle(self) -> None:
        self.optimizer.settle()

    def summary(self) -> Mapping[str, Any]:
        return {"early_steps": self.optimizer.early_steps, "steps_taken_back": self.optimizer.steps_taken_back}


class StaggeredIterations(IterationHooks):
    """Iterations after optimizer steps that may have to be undone."""

    def __init__(self, pipeline: Pipeline, optimizer: StaggeredOptimizer) -> None:
        super().__init__(pipeline)
        self._optimizer = optimizer

    def made(self, call: PipelineCall) -> None:
        """See IterationHooks. Raises UnsupportedFeatureError for settings under which steps cannot be staggered."""
        refuse_for_staggering(call.config)

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """See IterationHooks.

        After a step that may have to be undone, all ranks run a first attempt to its end, as its messages are in
        flight. If the step was undone, that attempt is discarded and repeated.
        """
        if not self._optimizer.unvalidated:
            return attempt(call, number)
        from adaptra_megatron.megatron.staggered_optimizer import RepeatableIteration

        repeatable = RepeatableIteration(call)
        ran = attempt(repeatable.call, number)
        if self._optimizer.settle():
            repeatable.rewind()
            ran = attempt(repeatable.call, number + 1)
        return ran

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        from adaptra_megatron.megatron.staggered_optimizer import ValidatedComputation

        return ValidatedComputation(computation, self._optimizer)


class ReplicaReductions(EngineFeature):
    """Gradient reductions that work around a straggler."""

    def __init__(self, config: AdaptraConfig) -> None:
        from adaptra_megatron.megatron.gradients.gradient_reduction import GradientReduction

        super().__init__()
        self.reduction = GradientReduction(config.gradient_sync, config.timeout_s)

    def summary(self) -> Mapping[str, Any]:
        return {"gradient_sync": self.reduction.used}

    def close(self) -> None:
        self.reduction.close()


class PartialUpdates(EngineFeature):
    """Parameter updates by some of the replicas."""

    def __init__(self, config: AdaptraConfig) -> None:
        from adaptra_megatron.megatron.replica_updates import ReplicaUpdates

        super().__init__()
        self.updates = ReplicaUpdates(config.sync_mode, config.max_staleness, config.timeout_s)

    def iterate(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        return self.updates.iterate(run, arguments)

    def settle(self) -> None:
        self.updates.settle()

    def summary(self) -> Mapping[str, Any]:
        return {"updates": dict(self.updates.used)}

    def close(self) -> None:
        self.updates.close()
